"""The queue places, queues and refuses by the rules, for any order of requests and heartbeats."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.scheduler_svc.model_queue import WaitingRequest
from tokenmesh.services.scheduler_svc.placement import Decision, LoadPlacement, Worker, capacity
from tokenmesh.services.scheduler_svc.request_queue import RequestQueue
from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.place import Place

MODEL = ModelName("m")


def worker(name: str, *, draining: bool = False, beat_at: float = 0.0, **load: float) -> Worker:
    facts: dict[str, float] = {"max_num_seqs": 4, "prefill_tokens_per_s": 1000.0, **load}
    return Worker(WorkerId(name), 7, WorkerLoad(**facts), draining, beat_at)  # type: ignore[arg-type]


def request(
    name: str = "r",
    *,
    tokens: int = 100,
    priority: int = 0,
    n: int = 1,
    exclude: tuple[str, ...] = (),
    tenant: str = "",
    weight: float = 1.0,
    group: int = 0,
) -> Place:
    return Place(
        request_id=RequestId(name),
        model=MODEL,
        num_tokens=tokens,
        max_tokens=10,
        num_streams=n,
        priority=priority,
        exclude=[WorkerId(name) for name in exclude],
        tenant=tenant,
        weight=weight,
        tenant_priority=group,
    )


def queue_of(*workers: Worker, **settings: float) -> tuple[RequestQueue, list[Worker]]:
    fleet = list(workers)
    options = SchedulerSettings(**settings)  # type: ignore[arg-type]
    return RequestQueue(options, lambda _: fleet, LoadPlacement(options)), fleet


async def chosen(queue: RequestQueue, place: Place, now: float = 1.0) -> str | None:
    waiting = await queue.submit(place, now)
    return waiting.placed.worker_id if waiting.placed else None


async def placed_by(
    queue: RequestQueue, now: float, *submitted: WaitingRequest
) -> list[WaitingRequest]:
    await queue.place_waiting(now)
    return [each for each in submitted if each.placed]


async def test_the_worker_with_the_shortest_estimated_ttft_wins() -> None:
    queue, _ = queue_of(worker("busy", queued_tokens=5000), worker("idle"))
    assert await chosen(queue, request()) == "idle"


async def test_a_request_removed_late_removes_none_of_the_next_queue() -> None:
    queue, fleet = queue_of(worker("w"))
    first = await queue.submit(request("first"), 1.0)
    assert first.placed
    fleet[:] = [worker("w", running=5)]
    second = await queue.submit(request("second"), 2.0)
    queue.remove(first)
    fleet[:] = [worker("w")]
    assert await placed_by(queue, 3.0, second) == [second]


async def test_a_slow_worker_is_not_chosen_even_when_idle() -> None:
    slow = worker("slow", prefill_tokens_per_s=100.0)
    queue, _ = queue_of(slow, worker("fast", queued_tokens=200, running=2))
    assert await chosen(queue, request(tokens=500)) == "fast"


async def test_a_full_kv_pool_costs_more_than_a_short_queue() -> None:
    full = worker("full", kv_blocks_used=98, kv_blocks_total=100)
    queue, _ = queue_of(full, worker("queued", queued_tokens=300))
    assert await chosen(queue, request()) == "queued"


async def test_equal_workers_take_turns_between_two_heartbeats() -> None:
    queue, _ = queue_of(worker("a"), worker("b"))
    assert {await chosen(queue, request()) for _ in range(2)} == {"a", "b"}


async def test_a_sleeping_worker_is_skipped_and_a_model_sleeps_when_all_of_its_workers_do() -> None:
    asleep, awake = worker("asleep", sleep_level=1), worker("awake", running=3)
    queue, fleet = queue_of(asleep, awake)
    assert await chosen(queue, request()) == "awake"
    assert await chosen(queue, request(exclude=("awake",))) == "awake"
    assert not queue.is_asleep(MODEL)
    # a draining worker does not count
    fleet[1] = worker("awake", draining=True)
    assert queue.is_asleep(MODEL)
    assert not queue.has_workers(request())
    assert await chosen(queue, request()) is None
    fleet[:] = [worker("leaving", draining=True)]
    assert not queue.is_asleep(MODEL)
    fleet.clear()
    assert not queue.is_asleep(MODEL)


async def test_draining_and_just_failed_workers_are_skipped() -> None:
    queue, _ = queue_of(
        worker("draining", draining=True), worker("failed"), worker("ok", running=3)
    )
    assert await chosen(queue, request(exclude=("failed",))) == "ok"


async def test_the_only_worker_is_chosen_again_although_it_failed() -> None:
    queue, _ = queue_of(worker("only"))
    assert await chosen(queue, request(exclude=("only",))) == "only"


async def test_requests_wait_while_all_are_full_until_a_heartbeat_shows_room() -> None:
    queue, fleet = queue_of(worker("a", running=5))
    waiting = await queue.submit(request(), 1.0)
    assert waiting.placed is None
    assert await placed_by(queue, 1.1, waiting) == []
    fleet[0] = worker("a", running=1, beat_at=1.2)
    assert await placed_by(queue, 1.2, waiting) == [waiting]
    assert waiting.placed is not None
    assert waiting.placed.queued_s == pytest.approx(0.2)


async def test_the_smaller_priority_number_is_served_first() -> None:
    queue, fleet = queue_of(worker("a", running=5))
    late = await queue.submit(request("late", priority=1), 1.0)
    soon = await queue.submit(request("soon", priority=-1), 1.1)
    assert (queue.position(soon), queue.position(late)) == (0, 1)
    fleet[0] = worker("a", running=4, beat_at=2.0)
    assert await placed_by(queue, 2.0, soon, late) == [soon]


class SlowPlacement(LoadPlacement):
    """Yields to the event loop, like a query to Redis."""

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        await asyncio.sleep(0)
        return await super().place(request, workers, now)


async def test_concurrent_requests_are_placed_and_refused_in_order() -> None:
    settings = SchedulerSettings(max_queued=2)
    queue = RequestQueue(settings, lambda _: [worker("a")], SlowPlacement(settings))
    arrivals = [queue.submit(request(str(number)), 1.0) for number in range(9)]
    submitted = await asyncio.gather(*arrivals, return_exceptions=True)
    room = capacity(worker("a").load)
    kinds = [
        "placed" if isinstance(each, WaitingRequest) and each.placed else type(each).__name__
        for each in submitted
    ]
    assert kinds == ["placed"] * room + ["WaitingRequest"] * 2 + ["Overloaded"] * (7 - room)
    assert queue.num_waiting == 2


async def test_requests_cancelled_while_others_are_placed_keep_the_order() -> None:
    settings = SchedulerSettings()
    queue = RequestQueue(settings, lambda _: [worker("a")], SlowPlacement(settings))
    arrivals = [asyncio.create_task(queue.submit(request(), 1.0)) for _ in range(4)]
    await asyncio.sleep(0)
    for arrival in arrivals[:2]:
        arrival.cancel()
    await asyncio.wait(arrivals)
    assert [bool(each.result().placed) for each in arrivals[2:]] == [True, True]
    assert queue.num_waiting == 0


async def test_past_the_bound_a_request_is_refused_with_an_estimate() -> None:
    queue, _ = queue_of(worker("a", running=5, queued_tokens=9000), max_queued=1)
    await queue.submit(request("first"), 1.0)
    with pytest.raises(Overloaded) as refused:
        await queue.submit(request("second"), 1.0)
    assert refused.value.retry_after_s == pytest.approx(9.1)
    assert queue.num_waiting == 1


async def test_a_client_that_leaves_is_removed_from_the_queue() -> None:
    queue, fleet = queue_of(worker("a", running=5))
    gone = await queue.submit(request("gone"), 1.0)
    stays = await queue.submit(request("stays"), 1.0)
    queue.remove(gone)
    queue.remove(gone)
    fleet[0] = worker("a", beat_at=2.0)
    assert await placed_by(queue, 2.0, gone, stays) == [stays]
    assert queue.num_waiting == 0


async def test_n_above_a_workers_capacity_is_placed_on_an_idle_worker() -> None:
    queue, _ = queue_of(worker("a"))
    assert await chosen(queue, request(n=64)) == "a"


async def test_a_request_that_waits_for_its_n_does_not_block_smaller_ones() -> None:
    queue, _ = queue_of(worker("a", running=4))
    assert await chosen(queue, request("wide", n=4)) is None
    assert await chosen(queue, request("narrow")) == "a"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "heartbeat", "leave"]), st.integers(1, 6), st.integers(0, 9)
        ),
        max_size=80,
    )
)
async def test_no_request_is_lost_overtaken_or_placed_beyond_capacity(
    events: list[tuple[str, int, int]],
) -> None:
    settings = SchedulerSettings(max_queued=8)
    fleet = [worker("a"), worker("b")]
    queue = RequestQueue(settings, lambda _: fleet, LoadPlacement(settings))
    pending: list[WaitingRequest] = []
    now = 0.0
    for kind, n, number in events:
        now += 1.0
        if kind == "submit":
            try:
                waiting = await queue.submit(request(n=1 + n % 2), now)
            except Overloaded:
                assert len(pending) == settings.max_queued
                continue
            pending.append(waiting)
        elif kind == "leave" and pending:
            queue.remove(pending.pop(number % len(pending)))
        elif kind == "heartbeat":
            fleet[number % 2] = worker("ab"[number % 2], running=n, beat_at=now)
            await queue.place_waiting(now)
        pending = [waiting for waiting in pending if not waiting.placed]
        assert queue.num_waiting == len(pending)
    for number, name in enumerate("ab"):
        fleet[number] = worker(name, max_num_seqs=1000, beat_at=now + 1)
    assert capacity(fleet[0].load) > len(pending)
    await queue.place_waiting(now + 1)
    assert all(waiting.placed for waiting in pending)


async def test_a_tenant_that_floods_delays_only_itself() -> None:
    queue, fleet = queue_of(worker("a", running=5))
    flood = [await queue.submit(request(tenant="flood", tokens=500), 1.0) for _ in range(40)]
    quiet = await queue.submit(request(tenant="quiet"), 1.1)
    assert queue.position(quiet) <= 1
    fleet[0] = worker("a", running=3, beat_at=2.0)
    placed = await placed_by(queue, 2.0, *flood, quiet)
    assert placed == [flood[0], quiet]
    # A client's priority orders only the requests of its tenant.
    urgent = await queue.submit(request(tenant="flood", priority=-9), 2.1)
    other = await queue.submit(request(tenant="other"), 2.2)
    fleet[0] = worker("a", running=3, beat_at=3.0)
    assert set(await placed_by(queue, 3.0, *flood[1:], urgent, other)) == {urgent, other}


async def test_a_class_comes_before_another_for_any_priority_of_its_requests() -> None:
    queue, fleet = queue_of(worker("a", running=5))
    later = await queue.submit(request(tenant="batch", group=1, priority=-9), 1.0)
    sooner = await queue.submit(request(tenant="chat"), 1.1)
    fleet[0] = worker("a", running=4, beat_at=2.0)
    assert await placed_by(queue, 2.0, later, sooner) == [sooner]


async def test_a_tenant_cannot_fill_the_queue() -> None:
    queue, _ = queue_of(worker("a", running=5), max_queued=4, max_queued_per_tenant=2)
    for _ in range(2):
        await queue.submit(request(tenant="flood"), 1.0)
    with pytest.raises(Overloaded, match="2 requests of the tenant flood"):
        await queue.submit(request(tenant="flood"), 1.0)
    await queue.submit(request(tenant="quiet"), 1.0)
    assert queue.num_waiting == 3


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0])
async def test_a_forged_weight_does_no_harm(weight: float) -> None:
    queue, fleet = queue_of(worker("a", running=5))
    forged = [await queue.submit(request(tenant="x", weight=weight), 1.0) for _ in range(3)]
    honest = await queue.submit(request(tenant="y", tokens=10**9), 1.0)
    fleet[0] = worker("a", max_num_seqs=100, beat_at=2.0)
    assert len(await placed_by(queue, 2.0, *forged, honest)) == 4
