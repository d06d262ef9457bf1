"""Breaker: when a worker is left out, and when it is probed."""

from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.gateway.core.mesh.liveness import Breaker
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.ids import WorkerId

SETTINGS = GatewaySettings(
    breaker_failures=3, breaker_half_life_s=10, breaker_s=2, breaker_max_s=8, breaker_workers=4
)
BAD = WorkerId("bad")


class Bench:
    """A breaker and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = Breaker(SETTINGS, lambda: self.now)

    def fail(self, times: int = 1, kind: str = "broken off", worker: WorkerId = BAD) -> None:
        for _ in range(times):
            self.breaker.fail(worker, kind)

    def is_out(self) -> bool:
        return BAD in self.breaker.left_out()


def test_a_few_failures_do_not_open_the_breaker() -> None:
    bench = Bench()
    bench.fail(2)
    assert not bench.is_out()
    bench.now += 20
    bench.fail(2)
    assert not bench.is_out()
    bench.fail()
    assert bench.is_out()


def test_a_dead_worker_is_left_out_at_once_and_a_draining_one_never() -> None:
    bench = Bench()
    bench.fail(9, "draining")
    bench.fail(9, "refused")
    assert not bench.is_out()
    bench.fail(1, "worker gone")
    assert bench.is_out()


def test_after_the_pause_one_placement_probes_the_worker() -> None:
    bench = Bench()
    bench.fail(3)
    bench.now += 2
    assert [bench.is_out() for _ in range(3)] == [False, True, True]
    bench.now += 2
    assert [bench.is_out() for _ in range(3)] == [False, True, True]
    bench.breaker.succeed(BAD)
    assert not bench.is_out()
    assert len(bench.breaker) == 0


def test_each_failed_probe_doubles_the_pause_up_to_a_bound() -> None:
    bench = Bench()
    bench.fail(3)
    for pause_s in (2, 4, 8, 8):
        bench.now += pause_s - 0.1
        assert bench.is_out()
        bench.now += 0.1
        assert not bench.is_out()
        bench.fail()


def test_streams_that_fail_together_are_one_failure() -> None:
    bench = Bench()
    bench.fail(50, "worker hung")
    bench.now += 2
    assert not bench.is_out()


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans())))
def test_the_number_of_remembered_workers_is_bounded(calls: list[tuple[str, bool]]) -> None:
    bench = Bench()
    for name, is_good in calls:
        if is_good:
            bench.breaker.succeed(WorkerId(name))
        else:
            bench.fail(1, "worker gone", WorkerId(name))
        assert len(bench.breaker.left_out()) <= 4


def test_the_last_one_to_fail_is_named_first() -> None:
    bench = Bench()
    for name in ("a", "b", "c", "a"):
        bench.fail(1, "worker gone", WorkerId(name))
    assert bench.breaker.left_out() == ["a", "c", "b"]
