"""Whom the line has no room for is told when it will, as far as its pace tells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler_svc.test_desk import request, worker
from tokenmesh.services.scheduler_svc.desk import Desk
from tokenmesh.services.scheduler_svc.pace import Pace
from tokenmesh.services.scheduler_svc.placement import Decision, Worker
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.messages.place import Place


async def retry_after_s(desk: Desk, now: float) -> float:
    with pytest.raises(Overloaded) as refused:
        await desk.arrive(request("late"), now)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


class Rooms:
    """Implements Placer: there is room for so many."""

    def __init__(self) -> None:
        self.num_free = 0

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        self.num_free -= 1
        return Decision(workers[0] if self.num_free >= 0 else None, [])

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        return 1.0


async def test_it_is_the_time_that_the_line_takes() -> None:
    rooms = Rooms()
    desk = Desk(SchedulerSettings(max_queued=20), lambda _: [worker("w")], rooms)
    for number in range(20):
        await desk.arrive(request(f"r{number}"), 0.0)
    # Nobody has left the line yet: what the worker needs is all that is known.
    assert await retry_after_s(desk, 1.0) == 1.0
    rooms.num_free = 4
    await desk.pump(2.0)
    for number in range(4):
        await desk.arrive(request(f"s{number}"), 3.0)
    # Four have left in the two seconds before, twenty wait.
    assert await retry_after_s(desk, 4.0) == pytest.approx(10.0)
    assert await retry_after_s(desk, 10.0) == pytest.approx(40.0)
    assert await retry_after_s(desk, 1000.0) == 60.0


@given(st.lists(st.floats(0, 100), max_size=300), st.integers(0, 2000), st.floats(0, 200))
def test_a_pace_is_never_negative_and_grows_with_the_line(
    times: list[float], num_ahead: int, now: float
) -> None:
    pace = Pace()
    for each in sorted(times):
        pace.note(each)
    assert 0.0 <= pace.wait_s(num_ahead, now) <= pace.wait_s(num_ahead + 1, now)
