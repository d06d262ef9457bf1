"""A tenant below its share of a worker is placed there although others have filled it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler_svc.test_desk import chosen, desk_of, placed_by, request, worker
from tokenmesh.services.scheduler_svc.placement import Worker
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.tenant_share import is_within_share


def full_of(tenants: dict[str, int], weight: float | None = None, beat_at: float = 0.0) -> Worker:
    """A worker of 8 rows; each tenant weighs 1."""
    return worker(
        "a",
        max_num_seqs=8,
        running=8,
        waiting=sum(tenants.values()) - 8,
        tenant_streams=tenants,  # type: ignore[arg-type]
        tenant_weight=len(tenants) if weight is None else weight,
        beat_at=beat_at,
    )


async def test_a_newcomer_gets_its_share_of_a_full_worker_and_no_more() -> None:
    desk, fleet = desk_of(full_of({"flood": 10}))
    assert await chosen(desk, request(tenant="flood")) is None
    placed = [await chosen(desk, request(tenant="quiet")) for _ in range(5)]
    assert placed == ["a"] * 4 + [None]
    # what the next beat tells takes the place of what was remembered
    fleet[0] = full_of({"flood": 10, "quiet": 4}, beat_at=2.0)
    assert await chosen(desk, request(tenant="quiet"), 2.1) is None
    fleet[0] = full_of({"flood": 10, "quiet": 3}, beat_at=3.0)
    await desk.pump(3.1)
    assert desk.num_waiting == 2


async def test_whoever_waits_before_a_newcomer_does_not_hold_it_up() -> None:
    desk, _ = desk_of(full_of({"flood": 10}))
    flood = [await desk.arrive(request(tenant="flood"), 1.0) for _ in range(20)]
    quiet = await desk.arrive(request(tenant="quiet"), 1.0)
    assert quiet.placed
    assert not any(ticket.placed for ticket in flood)


async def test_a_lesser_class_takes_no_share_while_a_greater_one_waits() -> None:
    desk, _ = desk_of(full_of({"chat": 10}))
    await desk.arrive(request(tenant="chat"), 1.0)
    batch = await desk.arrive(request(tenant="batch", group=1), 1.0)
    assert not batch.placed
    assert await placed_by(desk, 1.1, batch) == []


async def test_weights_make_larger_shares() -> None:
    desk, _ = desk_of(full_of({"flood": 10}))
    placed = [await chosen(desk, request(tenant="heavy", weight=3.0)) for _ in range(7)]
    assert placed == ["a"] * 6 + [None]


async def test_turns_are_shared_by_weight_although_most_tries_find_no_room() -> None:
    desk, fleet = desk_of(worker("a", running=5))
    asked = [request(tenant="light", tokens=290), request(tenant="heavy", tokens=90, weight=3.0)]
    waiting = [await desk.arrive(each, 1.0) for _ in range(150) for each in asked]
    for second in range(2, 102):
        for part, running in enumerate((5, 5, 4)):
            now = second + part / 10
            fleet[0] = worker("a", running=running, beat_at=now)
            await desk.pump(now)
    tokens: Counter[str] = Counter()
    for ticket in waiting:
        tokens[ticket.claim.tenant] += ticket.claim.cost if ticket.placed else 0
    assert sum(bool(ticket.placed) for ticket in waiting) == 100
    assert tokens["heavy"] / 3 == pytest.approx(tokens["light"], abs=400)


async def test_more_choices_than_its_share_wait_for_room() -> None:
    desk, _ = desk_of(full_of({"flood": 10}))
    assert await chosen(desk, request(tenant="quiet", n=4)) == "a"
    desk, _ = desk_of(full_of({"flood": 10}))
    assert await chosen(desk, request(tenant="quiet", n=5)) is None


async def test_a_worker_that_does_not_tell_whose_streams_it_has_is_full() -> None:
    desk, _ = desk_of(full_of({"flood": 10}, weight=0.0))
    assert await chosen(desk, request(tenant="quiet")) is None


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 100), min_size=1), st.integers(1, 64)
)
def test_shares_together_are_never_more_than_there_are_rows(
    weights: dict[str, float], rows: int
) -> None:
    load = WorkerLoad(
        max_num_seqs=rows,
        tenant_streams=dict.fromkeys(weights, 1),
        tenant_weight=sum(weights.values()),
    )
    most = [
        max(n for n in range(rows + 1) if n == 0 or is_within_share(load, tenant, weight, n))
        for tenant, weight in weights.items()
    ]
    assert sum(most) <= rows
    assert sum(most) > rows - len(weights)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_forged_weight_takes_no_more_than_the_largest_one(weight: float) -> None:
    load = WorkerLoad(max_num_seqs=101, tenant_streams={"a": 200}, tenant_weight=1.0)
    assert not is_within_share(load, "x", weight, 101)
