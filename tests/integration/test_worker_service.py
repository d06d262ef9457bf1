"""worker_svc as a service: from settings to beats, and how it ends."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.fakes.service_mesh import running
from tokenmesh.services.worker_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, WorkerId, new_instance_id
from tokenmesh.shared.lifecycle import StopSignals
from tokenmesh.shared.messages import Accepted, Generate, Heartbeat, Tokens
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.service import serve
from tokenmesh.shared.tokens import count_ids, pack_ids

GATEWAY = GatewayId("gateway-of-test")


def settings_of(
    directory: Path, bus: BusSettings, redis: RedisSettings, **worker: object
) -> Settings:
    models = (
        ModelSettings(model=str(directory), served_model_name=("sim", "alias")),
        ModelSettings(model="somewhere/else"),
    )
    limits = {"engine": "sim", "model": "sim", "sim_step_s": 0.001, **worker}
    return Settings(
        models=models, bus=bus, redis=redis, worker=WorkerSettings.model_validate(limits)
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write the files that a simulated model needs of a checkpoint."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 500,
        "max_position_embeddings": 256,
        "eos_token_id": [3, 900],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


async def test_a_simulated_worker_beats_and_serves(
    checkpoint: Path, bus: MessageBus, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    deltas: list[Delta] = []
    finished = asyncio.Event()

    async def take(envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        deltas.extend(envelope.message.deltas)
        if deltas[-1].finish is not None:
            finished.set()

    subscription = await bus.subscribe(subjects.gateway_tokens(GATEWAY), take)
    settings = settings_of(checkpoint, bus_settings, redis_settings)
    async with running("worker", settings, build) as mesh:
        async with asyncio.timeout(15):
            while not (members := mesh.members.workers(ModelName("alias"))):
                await mesh.beat_now()
                await mesh.bus.flush()
        beat = members[0].beat
        assert [card.max_model_len for card in beat.models] == [256]
        assert beat.load is not None
        assert beat.load.kv_blocks_total > 0
        question = Generate(
            request_id=RequestId("r"),
            model=ModelName("alias"),
            gateway=GATEWAY,
            stream=1,
            epoch=beat.epoch,
            prompt_ids=pack_ids([7, 8, 9]),
            sampling=SamplingParams(seed=1, max_tokens=5),
        )
        worker_id = WorkerId(mesh.instance_id)
        answer = await bus.request(
            subjects.worker_generate(worker_id), question, deadline_s=now_s() + 5
        )
        assert answer == Accepted(worker_id=worker_id)
        async with asyncio.timeout(15):
            await finished.wait()
        assert sum(count_ids(delta.token_ids) for delta in deltas) == 5
        await mesh.drain(1.0)
    await subscription.stop()


@pytest.mark.parametrize(
    ("worker", "complaint"),
    [({}, "config.json"), ({"model": "unknown"}, "a worker runs one model")],
)
async def test_a_worker_that_cannot_load_says_why_and_exits_with_2(
    tmp_path: Path,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    caplog: pytest.LogCaptureFixture,
    worker: dict[str, object],
    complaint: str,
) -> None:
    settings = settings_of(tmp_path, bus_settings, redis_settings, **worker)
    with caplog.at_level(logging.CRITICAL):
        assert await serve("worker", new_instance_id("worker"), settings, build, StopSignals()) == 2
    assert complaint in caplog.text


async def test_a_stopped_worker_says_goodbye_and_exits_with_0(
    checkpoint: Path, bus: MessageBus, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    stops = StopSignals()
    has_left = asyncio.Event()

    async def see(envelope: Envelope) -> None:
        beat = envelope.message
        assert isinstance(beat, Heartbeat)
        if [card.name for card in beat.models] == ["sim"]:
            stops.stop("test")
            if beat.leaving:
                has_left.set()

    subscription = await bus.subscribe(subjects.ALL_BEATS, see)
    settings = settings_of(checkpoint, bus_settings, redis_settings)
    assert await serve("worker", new_instance_id("worker"), settings, build, stops) == 0
    async with asyncio.timeout(15):
        await has_left.wait()
    await subscription.stop()
