"""Two workers and what one has computed for the other: the messages between them, by hand."""

import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.kv_workers import BLOCKS, GATEWAY, MODEL, PROMPT, SIZE, KvWorkers, Pair
from tests.fakes.models import make_model
from tokenmesh.engine.kv.block_pool import NO_PARENT, digest
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import RequestId, WorkerId
from tokenmesh.shared.messages import (
    Cancel,
    Done,
    Failed,
    Generate,
    KvReady,
    KvStarted,
    PollKv,
    PrefillKv,
    Refused,
    ReleaseKv,
)
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tokens import pack_ids

MakePair = Any


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def pair(
    checkpoint: Path,
    bus: MessageBus,
    bus_settings: BusSettings,
    redis_settings: RedisSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> MakePair:
    return KvWorkers(checkpoint, bus, bus_settings, redis_settings, monkeypatch).pair


async def test_a_prompt_that_another_worker_computes_draws_the_same_tokens(pair: MakePair) -> None:
    async with pair() as p:
        expected, cached = await p.run(p.source, PROMPT, cache_salt="alone")
        assert cached == 0
        before = p.source.computed
        assert await p.run(p.reader, PROMPT, kv=p.source.origin()) == (expected, 0)
        assert p.source.computed - before == len(PROMPT)
        assert p.reader.computed == len(PROMPT) - BLOCKS * SIZE
        # a second turn: the reader has it all, the source is not asked
        longer = [*PROMPT, *expected, 5, 6, 7]
        tokens, cached = await p.run(p.reader, longer, kv=p.source.origin())
        assert cached == (len(PROMPT) + 11) // SIZE * SIZE
        assert tokens == (await p.run(p.source, longer, cache_salt="alone"))[0]


@pytest.mark.parametrize(("library", "module"), [("nixl", "nixl_cu12"), ("mooncake", "mooncake")])
async def test_kv_goes_by_the_library_that_is_named(
    pair: MakePair, library: str, module: str
) -> None:
    if find_spec(module) is None:
        pytest.skip(f"{library} is not installed")
    async with pair(transports=(library,)) as p:
        assert list(p.source.parts.process.addresses) == [library]
        expected, _ = await p.run(p.source, PROMPT, cache_salt="alone")
        assert await p.run(p.reader, PROMPT, kv=p.source.origin()) == (expected, 0)
        assert p.reader.computed == len(PROMPT) - BLOCKS * SIZE


async def test_what_a_worker_has_is_a_hit_of_another_one_and_is_said_to_be_cached(
    pair: MakePair,
) -> None:
    async with pair() as p:
        expected, _ = await p.run(p.source, PROMPT)
        origin = p.source.origin(computes=False)
        assert await p.run(p.reader, PROMPT, kv=origin) == (expected, BLOCKS * SIZE)
        assert p.source.computed == len(PROMPT)


async def test_streams_with_the_same_prompt_share_one_load(pair: MakePair) -> None:
    async with pair() as p:
        streams = [
            await p.begin(p.reader, PROMPT, kv=p.source.origin(), sampling={"seed": seed})
            for seed in range(6)
        ]
        for stream in streams:
            assert (await p.finish(stream))[-1].error is None
        assert p.source.computed == len(PROMPT)
        assert p.reader.computed <= len(streams) * (len(PROMPT) - BLOCKS * SIZE)


async def test_a_source_of_another_scope_or_epoch_is_refused_and_the_prompt_computed(
    pair: MakePair,
) -> None:
    async with pair() as p:
        expected, _ = await p.run(p.source, PROMPT, cache_salt="alone")
        other = msgspec.structs.replace(p.source.origin(), epoch=1)
        assert (await p.run(p.reader, PROMPT, kv=other))[0] == expected
        assert p.reader.computed == len(PROMPT)
        generate = _generate(p)
        message = PrefillKv(
            generate=generate, reader=p.reader.id, scope=b"x" * 16, num_blocks=1, last_key=b"k" * 16
        )
        answer = await p.ask(p.source, message)
        assert isinstance(answer, Refused)
        assert "another model" in answer.reason
        # keys that differ are refused as well: the reader would take them for others
        shared = p.source.actor._loaded.shared_kv
        assert shared is not None
        message = msgspec.structs.replace(message, scope=shared.scope)
        answer = await p.ask(p.source, message)
        assert isinstance(answer, Refused)
        assert "other keys" in answer.reason
        # hashes are for what is there, and all of them
        for changes, reason in (
            ({"hashes": b"k" * 17}, "17 bytes"),
            ({"hashes": b"k" * 16, "computes": True}, "to be computed"),
            ({"hashes": b"j" * 16}, "other keys"),
        ):
            answer = await p.ask(p.source, msgspec.structs.replace(message, **changes))
            assert isinstance(answer, Refused)
            assert reason in answer.reason


def _generate(p: Pair, stream: int = 900) -> Generate:
    return Generate(
        request_id=RequestId("forged"),
        model=MODEL,
        gateway=GATEWAY,
        stream=stream,
        epoch=p.source.mesh.epoch,
        prompt_ids=pack_ids(PROMPT),
        sampling=SamplingParams(seed=1, max_tokens=4),
    )


async def test_a_lease_is_polled_released_and_ends_when_its_reader_is_silent(
    pair: MakePair,
) -> None:
    async with pair() as p:
        p.source.parts.desk.settings = p.source.parts.desk.settings.model_copy(
            update={"lease_s": 0.3}
        )
        await p.run(p.source, PROMPT)
        shared = p.source.actor._loaded.shared_kv
        assert shared is not None
        key = digest(NO_PARENT + pack_ids(PROMPT[:SIZE]))
        message = PrefillKv(
            generate=_generate(p),
            reader=p.reader.id,
            scope=shared.scope,
            num_blocks=1,
            last_key=key,
        )
        first = await p.ask(p.source, message)
        assert isinstance(first, KvStarted)
        assert await p.ask(p.source, message) == first  # repeated
        poll = PollKv(lease=first.lease, token=first.token, have=0)
        for _ in range(2):  # a lost answer
            ready = await p.ask(p.source, poll)
            assert isinstance(ready, KvReady)
            assert (len(ready.slots), ready.is_done) == (4, True)
        for forged in (
            msgspec.structs.replace(poll, token=b"y" * 32),
            msgspec.structs.replace(poll, lease=99),
            msgspec.structs.replace(poll, have=1 << 40),
            msgspec.structs.replace(poll, have=-1),
        ):
            with pytest.raises(Exception, match=r"lease has ended|no such lease"):
                await p.ask(p.source, forged)
        wrong = ReleaseKv(lease=first.lease, token=b"y" * 32)
        assert await p.ask(p.source, wrong) == Done()
        assert p.source.parts.desk.num_leases == 1
        await p.at_rest()
        assert p.source.parts.desk.num_expired == 1


async def test_a_source_whose_steps_take_longer_than_it_may_be_silent_brings_the_prompt(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(silent_s=0.6, load_failure_policy="fail") as p:
        expected, _ = await p.run(p.source, PROMPT, cache_salt="alone")
        engine = p.source.actor._host._engine
        step = engine.step

        def slow_step(*args: Any) -> Any:
            time.sleep(0.8)
            return step(*args)

        monkeypatch.setattr(engine, "step", slow_step)
        assert await p.run(p.reader, PROMPT, kv=p.source.origin()) == (expected, 0)
        assert p.reader.computed == len(PROMPT) - BLOCKS * SIZE


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_source_that_does_not_answer_is_named_or_the_prompt_is_computed(
    pair: MakePair, policy: str
) -> None:
    async with pair(load_failure_policy=policy) as p:
        expected, _ = await p.run(p.source, PROMPT, cache_salt="alone")
        gone = KvOrigin(worker_id=WorkerId("worker-gone"), epoch=1, computes=True)
        if policy == "recompute":
            assert (await p.run(p.reader, PROMPT, kv=gone))[0] == expected
            return
        found = await p.finish(await p.begin(p.reader, PROMPT, kv=gone))
        error = found[-1].error
        assert isinstance(error, Failed)
        assert (error.code, error.retryable, error.source) == (
            "kv_source_failed",
            True,
            "worker-gone",
        )


async def test_a_stream_that_is_cancelled_while_its_kv_comes_leaves_nothing(
    pair: MakePair,
) -> None:
    async with pair() as p:
        process = p.source.parts.process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        stream = await p.begin(p.reader, PROMPT, kv=p.source.origin())
        answer = await p.bus.request(
            subjects.worker_control(p.reader.id),
            Cancel(gateway=GATEWAY, stream=stream, attempt=0),
            deadline_s=now_s() + 5,
        )
        assert answer == Done()
        os.kill(process.pid, signal.SIGCONT)
        await p.at_rest()
