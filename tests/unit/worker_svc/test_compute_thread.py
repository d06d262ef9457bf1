"""ComputeThread: order, failures, and that it keeps nothing alive."""

import gc
import threading
import weakref
from functools import partial

import pytest

from tokenmesh.engine.exec.compute_thread import ComputeThread, Skipped
from tokenmesh.engine.plan import StepResult

WAIT_S = 10.0


def result_of(number: int) -> StepResult:
    return StepResult({0: [number]})


def numbers(*results: StepResult) -> list[int]:
    return [result.tokens[0][0] for result in results]


def test_a_result_is_there_when_its_step_ends_though_another_one_waits() -> None:
    gates = [threading.Event(), threading.Event()]
    began: list[int] = []

    def step(number: int) -> StepResult:
        began.append(number)
        assert gates[number].wait(WAIT_S)
        return result_of(number)

    compute = ComputeThread()
    first, second = (compute.submit(partial(step, number)) for number in range(2))
    assert not first.wait(0.01)
    gates[0].set()
    assert numbers(first.result()) == [0]
    assert not second.wait(0.01)
    gates[1].set()
    assert second.wait(WAIT_S)
    assert numbers(second.result()) == [1]
    assert began == [0, 1]


def test_steps_run_off_the_caller_on_one_thread() -> None:
    threads: set[int] = set()

    def step() -> StepResult:
        threads.add(threading.get_ident())
        return StepResult()

    compute = ComputeThread()
    for task in [compute.submit(step) for _ in range(5)]:
        task.result()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_step_on_top_of_a_failed_one_does_not_run() -> None:
    has_launched = threading.Event()
    ran: list[int] = []

    def fail() -> StepResult:
        assert has_launched.wait(WAIT_S)
        raise RuntimeError("out of memory")

    def step(number: int) -> StepResult:
        ran.append(number)
        return result_of(number)

    compute = ComputeThread()
    failing, on_top = compute.submit(fail), compute.submit(lambda: step(1))
    has_launched.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.result()
    with pytest.raises(Skipped):
        on_top.result()
    assert numbers(compute.submit(lambda: step(2)).result()) == [2]
    assert ran == [2]


def test_the_thread_ends_with_its_owner_and_keeps_no_step_alive() -> None:
    class Model:
        def step(self) -> StepResult:
            self.thread = threading.current_thread()
            return StepResult()

    model = Model()
    compute = ComputeThread()
    compute.submit(model.step).result()
    thread, seen = model.thread, weakref.ref(model)
    del model.thread, model, compute
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert seen() is None
