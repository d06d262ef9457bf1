"""A full queue refuses with the time until it is empty, at its current rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler_svc.test_request_queue import request, worker
from tokenmesh.services.scheduler_svc.model_queue import Departures
from tokenmesh.services.scheduler_svc.placement import Decision, Worker
from tokenmesh.services.scheduler_svc.request_queue import RequestQueue
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.messages.place import Place


async def retry_after_s(queue: RequestQueue, now: float) -> float:
    with pytest.raises(Overloaded) as refused:
        await queue.submit(request("late"), now)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


class Rooms:
    """A placer with room for `num_free` requests."""

    def __init__(self) -> None:
        self.num_free = 0

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        self.num_free -= 1
        return Decision(workers[0] if self.num_free >= 0 else None, [])

    def retry_after_s(self, request: Place, workers: list[Worker]) -> float:
        return 1.0


async def test_retry_after_is_the_time_until_the_queue_is_empty() -> None:
    rooms = Rooms()
    queue = RequestQueue(SchedulerSettings(max_queued=20), lambda _: [worker("w")], rooms)
    for number in range(20):
        await queue.submit(request(f"r{number}"), 0.0)
    # No request has left the queue yet: only the worker's own time is known.
    assert await retry_after_s(queue, 1.0) == 1.0
    rooms.num_free = 4
    await queue.place_waiting(2.0)
    for number in range(4):
        await queue.submit(request(f"s{number}"), 3.0)
    # Four have left in the last two seconds, twenty wait.
    assert await retry_after_s(queue, 4.0) == pytest.approx(10.0)
    assert await retry_after_s(queue, 10.0) == pytest.approx(40.0)
    assert await retry_after_s(queue, 1000.0) == 60.0


@given(st.lists(st.floats(0, 100), max_size=300), st.integers(0, 2000), st.floats(0, 200))
def test_the_estimate_is_never_negative_and_grows_with_the_queue(
    times: list[float], num_ahead: int, now: float
) -> None:
    departures = Departures()
    for each in sorted(times):
        departures.record(each)
    assert 0.0 <= departures.wait_s(num_ahead, now) <= departures.wait_s(num_ahead + 1, now)
