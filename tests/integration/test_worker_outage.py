"""A NATS restart in the middle of a stream: nothing is lost, no process counts as dead."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from tests.fakes.service_mesh import running
from tests.servers import Server, bus_settings_of
from tokenmesh.engine.core.sim import SimVocabulary, prompt_key, sim_token
from tokenmesh.services.worker_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import RedisSettings, ServiceSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages import Accepted, Done, Generate, Resend, Tokens
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import Delta
from tokenmesh.shared.service.mesh import HeartbeatSender
from tokenmesh.shared.tokens import pack_ids, unpack_ids

GATEWAY = GatewayId("gateway-of-test")
MODEL = ModelName("sim")
PROMPT = [7, 8, 9]
SAMPLING = SamplingParams(seed=1, max_tokens=300)
OUTAGE_S = 1.2


class Inbox:
    """Keeps what reached the gateway."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._arrived = asyncio.Event()

    async def take(self, envelope: Envelope) -> None:
        assert isinstance(envelope.message, Tokens)
        self.deltas.extend(envelope.message.deltas)
        self._arrived.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()


def make_settings(tmp_path: Path, nats: Server, redis: RedisSettings) -> Settings:
    """A worker that takes 10 ms a token and counts a silent process as gone after 0.4 s."""
    config = {"vocab_size": 500, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return Settings(
        models=(ModelSettings(model=str(tmp_path), served_model_name=(MODEL,)),),
        bus=bus_settings_of(nats),
        redis=redis,
        service=ServiceSettings(worker_beat_interval_s=0.1),
        worker=WorkerSettings(
            engine="sim", sim_step_s=0.01, gateway_check_s=0.05, gateway_grace_s=0.5
        ),
    )


async def test_a_nats_restart_loses_no_token_and_ends_no_stream(
    tmp_path: Path, start_nats: Callable[[], Server], redis_settings: RedisSettings
) -> None:
    nats = start_nats()
    settings = make_settings(tmp_path, nats, redis_settings)
    bus = await connect(settings.bus, "gateway")
    beats = HeartbeatSender(bus, "gateway", InstanceId(GATEWAY), epoch=1, interval_s=0.1)
    beating = asyncio.create_task(beats.run())
    inbox = Inbox()
    deltas = inbox.deltas
    await bus.subscribe(subjects.gateway_tokens(GATEWAY), inbox.take)
    async with running("worker", settings, build) as mesh:
        worker_id = WorkerId(mesh.instance_id)
        question = Generate(
            request_id=RequestId("r"),
            model=MODEL,
            gateway=GATEWAY,
            stream=1,
            epoch=mesh.epoch,
            prompt_ids=pack_ids(PROMPT),
            sampling=SAMPLING,
        )
        answer = await bus.request(
            subjects.worker_generate(worker_id), question, deadline_s=now_s() + 5
        )
        assert answer == Accepted(worker_id=worker_id)
        await inbox.until(lambda: len(deltas) > 5)
        nats.stop()
        await asyncio.sleep(OUTAGE_S)
        nats.start()
        await inbox.until(lambda: any(delta.finish is not None for delta in deltas))
        assert {delta.finish for delta in deltas} == {None, "length"}
        deltas.clear()
        again = Resend(gateway=GATEWAY, stream=1, attempt=0, offset=0)
        control = subjects.worker_control(worker_id)
        assert await bus.request(control, again, deadline_s=now_s() + 5) == Done()
        await inbox.until(lambda: bool(deltas))
    beating.cancel()
    await bus.close()
    vocabulary = SimVocabulary(500)
    key = prompt_key(PROMPT)
    expected = [sim_token(key, SAMPLING, position, vocabulary) for position in range(300)]
    assert unpack_ids(deltas[0].token_ids) == expected
