"""Streams of a worker end with their gateway, with the worker, all at once, or one by one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.worker_rig import (
    EPOCH,
    GATEWAY,
    MODEL,
    SETTINGS,
    VOCABULARY,
    WORKER,
    Brakes,
    Rig,
    image,
    no_beat,
    running_rig,
)
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.sim import SimLaunch, SimRunner
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.services.worker_svc import preparation
from tokenmesh.services.worker_svc.actor import WorkerActor, WorkerContext
from tokenmesh.services.worker_svc.grammar.compiler import GrammarCompiler
from tokenmesh.services.worker_svc.intake import Identity
from tokenmesh.services.worker_svc.loaded import SimModel
from tokenmesh.services.worker_svc.thread import Command, EngineThread
from tokenmesh.shared import subjects
from tokenmesh.shared.actor import ActorRuntime
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.config.mesh import ServiceSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Draining
from tokenmesh.shared.messages import Cancel, Done, Drain, Ping, Sleep
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.tensor_blob import TensorBlob


@pytest.fixture
async def rig(bus: MessageBus, blobs: Blobs) -> AsyncIterator[Rig]:
    async with running_rig(bus, blobs) as rig:
        yield rig


async def test_beats_say_that_grammar_libraries_are_being_loaded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not rig.actor.load().is_compiler_starting
    compiler = GrammarCompiler(Path("none"), 10, frozenset({2}), WorkerSettings(engine="sim"))
    monkeypatch.setattr(rig.actor._preparation, "grammars", compiler)
    assert not rig.actor.load().is_compiler_starting
    starting = compiler.start(after=asyncio.Event())
    assert rig.actor.load().is_compiler_starting
    await compiler.stop()
    assert starting.cancelled()
    assert not rig.actor.load().is_compiler_starting


async def test_streams_of_a_vanished_gateway_end(rig: Rig) -> None:
    # Held from the start: a busy machine could otherwise let the stream end by itself.
    rig.brakes.hold()
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=400))
    rig.alive.clear()
    async with asyncio.timeout(15):
        while not all(each.is_cancelled for each in rig.actor._streams.live()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    rig.brakes.release()
    assert (await rig.finished())[-1].finish == "abort"


async def test_a_draining_worker_refuses_and_hands_over_what_is_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands_over, submit = asyncio.Event(), rig.actor._host.submit

    def note(command: Command) -> None:
        submit(command)
        hands_over.set()

    assert await rig.control(Ping()) == Done()
    rig.brakes.hold()
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=400))
    assert await rig.control(Drain()) == Done()
    assert rig.left
    # not for want of room: its client shall not get 429
    with pytest.raises(Draining):
        await rig.generate(2)
    monkeypatch.setattr(rig.actor._host, "submit", note)
    draining = asyncio.create_task(rig.actor.drain(0.6))
    async with asyncio.timeout(15):
        await hands_over.wait()
    rig.brakes.release()
    await draining
    last = (await rig.finished())[-1]
    assert last.finish == "error"
    assert last.error is not None
    assert last.error.retryable


async def test_a_draining_worker_finishes_short_streams(rig: Rig) -> None:
    await rig.generate()
    await rig.actor.drain(5.0)
    assert (await rig.finished())[-1].finish == "length"


class BrokenLaunch(SimLaunch):
    """Fails."""

    def result(self) -> StepResult:
        raise RuntimeError("no such device")


class BrokenRunner(SimRunner):
    """Fails in every step."""

    def launch(self, plan: StepPlan) -> SimLaunch:
        return BrokenLaunch(StepResult(), 0.0, Brakes())


async def test_an_engine_that_keeps_failing_ends_the_service_and_every_stream(
    bus: MessageBus, blobs: Blobs
) -> None:
    runner = BrokenRunner(VOCABULARY, SETTINGS, Brakes())
    loaded = SimModel(runner, 512, VOCABULARY.size, frozenset())
    around = WorkerContext(bus, blobs, Metrics(), lambda _: True, lambda: None, no_beat)
    host = EngineThread(Engine(runner, SETTINGS), SETTINGS)
    actor = WorkerActor(Identity(WORKER, EPOCH, (MODEL,)), SETTINGS, loaded, host, around)
    fatal = asyncio.Event()
    runtime = ActorRuntime(actor, bus, ServiceSettings(), on_fatal=lambda _: fatal.set())
    rig = Rig(bus, actor, Brakes(), Metrics(), {GATEWAY}, [])
    subscription = await bus.subscribe(subjects.gateway_tokens(GATEWAY), rig.take)
    await runtime.listen(subjects.worker_generate(WORKER))
    await rig.generate(1)
    (failed,) = await rig.finished(1)
    assert failed.error is not None
    assert failed.error.retryable
    assert "no such device" in failed.error.message
    assert not fatal.is_set()
    await rig.generate(2)
    await rig.finished(2)
    async with asyncio.timeout(15):
        await fatal.wait()
    await runtime.stop(grace_s=0.5)
    await subscription.stop()


async def test_a_step_that_never_ends_ends_the_service(bus: MessageBus, blobs: Blobs) -> None:
    brakes = Brakes()
    brakes.hold()
    hasty = SETTINGS.model_copy(update={"max_step_s": 0.1, "engine_check_s": 0.02})
    runner = SimRunner(VOCABULARY, hasty, brakes)
    loaded = SimModel(runner, 512, VOCABULARY.size, frozenset())
    around = WorkerContext(bus, blobs, Metrics(), lambda _: True, lambda: None, no_beat)
    host = EngineThread(Engine(runner, hasty), hasty)
    actor = WorkerActor(Identity(WORKER, EPOCH, (MODEL,)), hasty, loaded, host, around)
    fatal: asyncio.Queue[str] = asyncio.Queue()
    runtime = ActorRuntime(actor, bus, ServiceSettings(), on_fatal=fatal.put_nowait)
    await runtime.listen(subjects.worker_generate(WORKER))
    await Rig(bus, actor, brakes, Metrics(), {GATEWAY}, []).generate()
    async with asyncio.timeout(15):
        assert await fatal.get() == "watch engine"
    brakes.release()
    await runtime.stop(grace_s=0.5)


@pytest.mark.parametrize("way", ["drain", "sleep"])
async def test_a_stream_waiting_for_its_media_ends_with_all_streams(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    fetching, has_ended = asyncio.Event(), asyncio.Event()

    async def fetch(*_: object) -> dict[str, TensorBlob]:
        fetching.set()
        await has_ended.wait()
        return {}

    monkeypatch.setattr(preparation, "fetch_embeddings", fetch)
    asking = asyncio.create_task(rig.generate(media=[image(2, 3)]))
    async with asyncio.timeout(15):
        await fetching.wait()
    ending = rig.control(Sleep(level=1, mode="abort")) if way == "sleep" else rig.actor.drain(0.2)
    ended = asyncio.create_task(ending)
    (delta,) = await rig.finished()
    has_ended.set()
    assert delta.error is not None
    assert delta.error.code == {"drain": "draining", "sleep": "asleep"}[way]
    await asking
    await ended
    await rig.idle()
    assert len(rig.deltas()) == 1


async def test_a_stream_that_is_cancelled_many_times_is_one_command(rig: Rig) -> None:
    rig.brakes.hold()
    await rig.generate(sampling=SamplingParams(seed=5, max_tokens=400))
    answers = [await rig.control(Cancel(gateway=GATEWAY, stream=1, attempt=0)) for _ in range(50)]
    rig.brakes.release()
    assert answers == [Done()] * 50
    assert [delta.finish for delta in await rig.finished()][-1] == "abort"
