"""EngineThread: what it does with the step in flight when it is watched, asked and stopped."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress

import pytest

from tokenmesh.engine.core.engine import ABORTED, Engine, EngineBroken
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.services.worker_svc.thread import Add, End, EngineThread, Perform, Stop
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import GatewayId

MakeRequest = Callable[..., Request]
SETTINGS = WorkerSettings(sim_step_s=0.02, sim_num_blocks=64)
WAIT_S = 10.0


class Gate:
    """Steps end when it opens."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.entered = threading.Event()

    def __call__(self, seconds: float) -> None:
        self.entered.set()
        assert self._opened.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def thread_of(gate: Gate) -> EngineThread:
    runner = SimRunner(SimVocabulary(100), SETTINGS, gate)
    thread = EngineThread(Engine(runner, SETTINGS), SETTINGS)
    thread.start()
    return thread


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, WAIT_S)


async def test_a_step_in_flight_is_seen_and_handed_out_before_the_thread_leaves(
    gate: Gate, make_request: MakeRequest
) -> None:
    thread = thread_of(gate)
    assert thread.busy_s == 0
    thread.submit(Add(make_request(1, [1, 2, 3], max_tokens=50)))
    await entered(gate)
    assert thread.busy_s > 0
    assert not thread.stop(timeout_s=0.05)
    gate.open()
    assert await asyncio.to_thread(thread.stop, WAIT_S)
    assert thread.busy_s == 0
    deltas = [each for output in thread.take_outputs() for each in output.deltas.values()]
    assert len(deltas) == 2, "the step at hand, and the one that was launched on top of it"
    assert thread.failure is None


async def test_what_is_performed_finds_no_step_in_flight(
    gate: Gate, make_request: MakeRequest
) -> None:
    thread = thread_of(gate)
    thread.submit(Add(make_request(1, [1, 2, 3], max_tokens=50)))
    await entered(gate)
    seen: Future[float | None] = Future()
    thread.submit(Perform(lambda engine: engine.busy_since_s, seen))
    gate.open()
    assert await asyncio.wait_for(asyncio.wrap_future(seen), WAIT_S) is None
    thread.submit(Stop())
    assert await asyncio.to_thread(thread.stop, WAIT_S)


async def test_a_failure_shows_although_no_outputs_are_read(
    gate: Gate, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = {"max_unpublished_steps": 1, "publish_wait_s": 0.05, "max_step_failures": 1}
    settings = SETTINGS.model_copy(update={**hasty, "async_scheduling": False})
    runner = SimRunner(SimVocabulary(100), settings, gate)

    def fail(_: float) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(runner, "_wait", fail)
    thread = EngineThread(Engine(runner, settings), settings)
    thread._outputs.put_nowait(StepOutput(step=0))
    thread.submit(Add(make_request(1, [1, 2, 3])))
    thread.start()
    async with asyncio.timeout(WAIT_S):
        await thread.outputs_ready.wait()
    assert isinstance(thread.failure, EngineBroken)
    assert await asyncio.to_thread(thread.stop, WAIT_S)


async def test_it_leaves_a_queue_of_commands_that_is_full(
    gate: Gate, make_request: MakeRequest
) -> None:
    thread = thread_of(gate)
    thread.submit(Add(make_request(1, [1, 2, 3], max_tokens=50)))
    await entered(gate)
    unknown = End(ABORTED, StreamKey(GatewayId("gateway"), 2, 0))
    with suppress(Overloaded):
        while True:
            thread.submit(unknown)
    assert not thread.stop(timeout_s=0.05)
    gate.open()
    assert await asyncio.to_thread(thread.stop, WAIT_S)
