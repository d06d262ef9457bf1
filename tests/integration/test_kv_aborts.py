"""Streams that are cancelled while their KV comes, from another worker and from disk."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.fakes.kv_workers import GATEWAY, PROMPT, KvWorkers, Pair
from tests.fakes.models import make_model
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.messages import Cancel, Done

AT_A_TIME = 8
LONGEST_S = 0.03


async def abort(p: Pair, dice: Random, prompt: list[int]) -> None:
    """Begin a stream whose prompt is elsewhere, and cancel it at any moment."""
    origin = p.source.origin(computes=dice.random() < 0.7)
    kv = origin if dice.random() < 0.8 else None
    stream = await p.begin(p.reader, prompt, kv=kv, sampling={"max_tokens": 30})
    await asyncio.sleep(dice.random() * LONGEST_S)
    answer = await p.bus.request(
        subjects.worker_control(p.reader.id),
        Cancel(gateway=GATEWAY, stream=stream, attempt=0),
        deadline_s=now_s() + 10,
    )
    assert answer == Done()


@pytest.mark.parametrize(
    "number",
    [32, pytest.param(10_000, marks=(pytest.mark.slow, pytest.mark.timeout(1800)))],
)
async def test_streams_that_are_aborted_at_any_moment_leave_nothing_and_no_wrong_token(
    tmp_path: Path,
    bus: MessageBus,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    dice, checkpoint = Random(number), tmp_path / "llama"
    make_model("llama").save_pretrained(checkpoint)
    workers = KvWorkers(checkpoint, bus, bus_settings, redis_settings, monkeypatch)
    kv = {"role": "both", "disk_dir": str(tmp_path / "kv"), "disk_size": 0.01}
    prompts = [[token + at for token in PROMPT] for at in range(5)]
    # at rest afterwards: no lease, no pin, no loading slot
    async with workers.sides(2, kv) as p:
        expected = [(await p.run(p.source, prompt, cache_salt="alone"))[0] for prompt in prompts]
        for _ in range(0, number, AT_A_TIME):
            p.deltas.clear()
            await asyncio.gather(*(abort(p, dice, dice.choice(prompts)) for _ in range(AT_A_TIME)))
            # the queue of the reader is bounded
            assert await p.reader.actor._streams.wait_idle(10)
        await p.at_rest()
        for side in p.sides:
            assert await side.actor._streams.wait_idle(10)
            assert side.parts.process.num_restarts == 0
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert (await p.run(p.reader, prompt, kv=p.source.origin()))[0] == tokens
