"""The desk places, queues and refuses by the rules, for any order of arrivals and beats."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.services.scheduler_svc.cost import capacity
from tokenmesh.services.scheduler_svc.desk import Desk
from tokenmesh.services.scheduler_svc.placement import Decision, Placement, Worker
from tokenmesh.services.scheduler_svc.waiting import Ticket
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


def desk_of(*workers: Worker, **settings: float) -> tuple[Desk, list[Worker]]:
    fleet = list(workers)
    options = SchedulerSettings(**settings)  # type: ignore[arg-type]
    return Desk(options, lambda _: fleet, Placement(options)), fleet


async def chosen(desk: Desk, place: Place, now: float = 1.0) -> str | None:
    ticket = await desk.arrive(place, now)
    return ticket.placed.worker_id if ticket.placed else None


async def placed_by(desk: Desk, now: float, *tickets: Ticket) -> list[Ticket]:
    await desk.pump(now)
    return [ticket for ticket in tickets if ticket.placed]


async def test_the_worker_with_the_shortest_estimated_ttft_wins() -> None:
    desk, _ = desk_of(worker("busy", queued_tokens=5000), worker("idle"))
    assert await chosen(desk, request()) == "idle"


async def test_whoever_leaves_late_takes_nobody_of_the_next_line_along() -> None:
    desk, fleet = desk_of(worker("w"))
    first = await desk.arrive(request("first"), 1.0)
    assert first.placed
    fleet[:] = [worker("w", running=5)]
    second = await desk.arrive(request("second"), 2.0)
    desk.leave(first)
    fleet[:] = [worker("w")]
    assert await placed_by(desk, 3.0, second) == [second]


async def test_a_slow_worker_prices_itself_out_even_when_idle() -> None:
    slow = worker("slow", prefill_tokens_per_s=100.0)
    desk, _ = desk_of(slow, worker("fast", queued_tokens=200, running=2))
    assert await chosen(desk, request(tokens=500)) == "fast"


async def test_a_full_kv_pool_costs_more_than_a_short_queue() -> None:
    full = worker("full", kv_blocks_used=98, kv_blocks_total=100)
    desk, _ = desk_of(full, worker("queued", queued_tokens=300))
    assert await chosen(desk, request()) == "queued"


async def test_equal_workers_take_turns_between_two_beats() -> None:
    desk, _ = desk_of(worker("a"), worker("b"))
    assert {await chosen(desk, request()) for _ in range(2)} == {"a", "b"}


async def test_a_sleeping_worker_is_passed_over_and_a_model_sleeps_when_all_of_its_workers_do() -> (
    None
):
    asleep, awake = worker("asleep", sleep_level=1), worker("awake", running=3)
    desk, fleet = desk_of(asleep, awake)
    assert await chosen(desk, request()) == "awake"
    assert await chosen(desk, request(exclude=("awake",))) == "awake"
    assert not desk.is_asleep(MODEL)
    # who is about to leave will not be there to take anything
    fleet[1] = worker("awake", draining=True)
    assert desk.is_asleep(MODEL)
    assert not desk.has_workers(MODEL)
    assert await chosen(desk, request()) is None
    fleet[:] = [worker("leaving", draining=True)]
    assert not desk.is_asleep(MODEL)
    fleet.clear()
    assert not desk.is_asleep(MODEL)


async def test_draining_and_just_failed_workers_are_passed_over() -> None:
    desk, _ = desk_of(worker("draining", draining=True), worker("failed"), worker("ok", running=3))
    assert await chosen(desk, request(exclude=("failed",))) == "ok"


async def test_the_only_worker_is_asked_again_although_it_failed() -> None:
    desk, _ = desk_of(worker("only"))
    assert await chosen(desk, request(exclude=("only",))) == "only"


async def test_requests_wait_when_all_are_full_and_go_on_when_a_beat_shows_room() -> None:
    desk, fleet = desk_of(worker("a", running=5))
    ticket = await desk.arrive(request(), 1.0)
    assert ticket.placed is None
    assert await placed_by(desk, 1.1, ticket) == []
    fleet[0] = worker("a", running=1, beat_at=1.2)
    assert await placed_by(desk, 1.2, ticket) == [ticket]
    assert ticket.placed is not None
    assert ticket.placed.queued_s == pytest.approx(0.2)


async def test_the_smaller_priority_number_is_served_first() -> None:
    desk, fleet = desk_of(worker("a", running=5))
    late = await desk.arrive(request("late", priority=1), 1.0)
    soon = await desk.arrive(request("soon", priority=-1), 1.1)
    assert (desk.position(soon), desk.position(late)) == (0, 1)
    fleet[0] = worker("a", running=4, beat_at=2.0)
    assert await placed_by(desk, 2.0, soon, late) == [soon]


class SlowPlacement(Placement):
    """Takes a moment, as a question to Redis does."""

    async def place(self, request: Place, workers: list[Worker], now: float) -> Decision:
        await asyncio.sleep(0)
        return await super().place(request, workers, now)


async def test_requests_that_come_at_once_are_placed_and_refused_in_their_order() -> None:
    settings = SchedulerSettings(max_queued=2)
    desk = Desk(settings, lambda _: [worker("a")], SlowPlacement(settings))
    arrivals = [desk.arrive(request(str(number)), 1.0) for number in range(9)]
    tickets = await asyncio.gather(*arrivals, return_exceptions=True)
    room = capacity(worker("a").load, settings)
    kinds = [
        "placed" if isinstance(each, Ticket) and each.placed else type(each).__name__
        for each in tickets
    ]
    assert kinds == ["placed"] * room + ["Ticket"] * 2 + ["Overloaded"] * (7 - room)
    assert desk.num_waiting == 2


async def test_who_leaves_while_others_are_placed_leaves_the_line_in_order() -> None:
    settings = SchedulerSettings()
    desk = Desk(settings, lambda _: [worker("a")], SlowPlacement(settings))
    arrivals = [asyncio.create_task(desk.arrive(request(), 1.0)) for _ in range(4)]
    await asyncio.sleep(0)
    for arrival in arrivals[:2]:
        arrival.cancel()
    await asyncio.wait(arrivals)
    assert [bool(each.result().placed) for each in arrivals[2:]] == [True, True]
    assert desk.num_waiting == 0


async def test_past_the_bound_a_request_is_refused_with_an_estimate() -> None:
    desk, _ = desk_of(worker("a", running=5, queued_tokens=9000), max_queued=1)
    await desk.arrive(request("first"), 1.0)
    with pytest.raises(Overloaded) as refused:
        await desk.arrive(request("second"), 1.0)
    assert refused.value.retry_after_s == pytest.approx(9.1)
    assert desk.num_waiting == 1


async def test_a_client_that_leaves_gives_up_its_place_in_line() -> None:
    desk, fleet = desk_of(worker("a", running=5))
    gone = await desk.arrive(request("gone"), 1.0)
    stays = await desk.arrive(request("stays"), 1.0)
    desk.leave(gone)
    desk.leave(gone)
    fleet[0] = worker("a", beat_at=2.0)
    assert await placed_by(desk, 2.0, gone, stays) == [stays]
    assert desk.num_waiting == 0


async def test_n_above_a_workers_capacity_is_placed_on_an_idle_worker() -> None:
    desk, _ = desk_of(worker("a"))
    assert await chosen(desk, request(n=64)) == "a"


async def test_a_request_that_waits_for_its_n_does_not_block_smaller_ones() -> None:
    desk, _ = desk_of(worker("a", running=4))
    assert await chosen(desk, request("wide", n=4)) is None
    assert await chosen(desk, request("narrow")) == "a"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "beat", "leave"]), st.integers(1, 6), st.integers(0, 9)
        ),
        max_size=80,
    )
)
async def test_nobody_is_lost_overtaken_or_placed_beyond_capacity(
    events: list[tuple[str, int, int]],
) -> None:
    settings = SchedulerSettings(max_queued=8)
    fleet = [worker("a"), worker("b")]
    desk = Desk(settings, lambda _: fleet, Placement(settings))
    waiting: list[Ticket] = []
    now = 0.0
    for kind, n, number in events:
        now += 1.0
        if kind == "arrive":
            try:
                ticket = await desk.arrive(request(n=1 + n % 2), now)
            except Overloaded:
                assert len(waiting) == settings.max_queued
                continue
            waiting.append(ticket)
        elif kind == "leave" and waiting:
            desk.leave(waiting.pop(number % len(waiting)))
        elif kind == "beat":
            fleet[number % 2] = worker("ab"[number % 2], running=n, beat_at=now)
            await desk.pump(now)
        waiting = [ticket for ticket in waiting if not ticket.placed]
        assert desk.num_waiting == len(waiting)
    for number, name in enumerate("ab"):
        fleet[number] = worker(name, max_num_seqs=1000, beat_at=now + 1)
    assert capacity(fleet[0].load, settings) > len(waiting)
    await desk.pump(now + 1)
    assert all(ticket.placed for ticket in waiting)


async def test_a_tenant_that_floods_delays_only_itself() -> None:
    desk, fleet = desk_of(worker("a", running=5))
    flood = [await desk.arrive(request(tenant="flood", tokens=500), 1.0) for _ in range(40)]
    quiet = await desk.arrive(request(tenant="quiet"), 1.1)
    assert desk.position(quiet) <= 1
    fleet[0] = worker("a", running=3, beat_at=2.0)
    placed = await placed_by(desk, 2.0, *flood, quiet)
    assert placed == [flood[0], quiet]
    # What a client calls urgent is so among its tenant's own.
    urgent = await desk.arrive(request(tenant="flood", priority=-9), 2.1)
    other = await desk.arrive(request(tenant="other"), 2.2)
    fleet[0] = worker("a", running=3, beat_at=3.0)
    assert set(await placed_by(desk, 3.0, *flood[1:], urgent, other)) == {urgent, other}


async def test_a_class_comes_before_another_whatever_its_requests_say() -> None:
    desk, fleet = desk_of(worker("a", running=5))
    later = await desk.arrive(request(tenant="batch", group=1, priority=-9), 1.0)
    sooner = await desk.arrive(request(tenant="chat"), 1.1)
    fleet[0] = worker("a", running=4, beat_at=2.0)
    assert await placed_by(desk, 2.0, later, sooner) == [sooner]


async def test_a_tenant_cannot_fill_the_line() -> None:
    desk, _ = desk_of(worker("a", running=5), max_queued=4, max_queued_per_tenant=2)
    for _ in range(2):
        await desk.arrive(request(tenant="flood"), 1.0)
    with pytest.raises(Overloaded, match="2 requests of the tenant flood"):
        await desk.arrive(request(tenant="flood"), 1.0)
    await desk.arrive(request(tenant="quiet"), 1.0)
    assert desk.num_waiting == 3


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0])
async def test_a_forged_weight_does_no_harm(weight: float) -> None:
    desk, fleet = desk_of(worker("a", running=5))
    forged = [await desk.arrive(request(tenant="x", weight=weight), 1.0) for _ in range(3)]
    honest = await desk.arrive(request(tenant="y", tokens=10**9), 1.0)
    fleet[0] = worker("a", max_num_seqs=100, beat_at=2.0)
    assert len(await placed_by(desk, 2.0, *forged, honest)) == 4
