"""A tenant below its share of a worker is placed there although others have filled it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.scheduler_svc.test_request_queue import chosen, placed_by, queue_of, request, worker
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
    queue, fleet = queue_of(full_of({"flood": 10}))
    assert await chosen(queue, request(tenant="flood")) is None
    placed = [await chosen(queue, request(tenant="quiet")) for _ in range(5)]
    assert placed == ["a"] * 4 + [None]
    # the next heartbeat replaces the reservations
    fleet[0] = full_of({"flood": 10, "quiet": 4}, beat_at=2.0)
    assert await chosen(queue, request(tenant="quiet"), 2.1) is None
    fleet[0] = full_of({"flood": 10, "quiet": 3}, beat_at=3.0)
    await queue.place_waiting(3.1)
    assert queue.num_waiting == 2


async def test_requests_that_wait_before_a_newcomer_do_not_block_it() -> None:
    queue, _ = queue_of(full_of({"flood": 10}))
    flood = [await queue.submit(request(tenant="flood"), 1.0) for _ in range(20)]
    quiet = await queue.submit(request(tenant="quiet"), 1.0)
    assert quiet.placed
    assert not any(waiting.placed for waiting in flood)


async def test_a_lower_class_gets_no_share_while_a_higher_one_waits() -> None:
    queue, _ = queue_of(full_of({"chat": 10}))
    await queue.submit(request(tenant="chat"), 1.0)
    batch = await queue.submit(request(tenant="batch", group=1), 1.0)
    assert not batch.placed
    assert await placed_by(queue, 1.1, batch) == []


async def test_weights_make_larger_shares() -> None:
    queue, _ = queue_of(full_of({"flood": 10}))
    placed = [await chosen(queue, request(tenant="heavy", weight=3.0)) for _ in range(7)]
    assert placed == ["a"] * 6 + [None]


async def test_turns_are_shared_by_weight_although_most_attempts_find_no_room() -> None:
    queue, fleet = queue_of(worker("a", running=5))
    mix = [request(tenant="light", tokens=290), request(tenant="heavy", tokens=90, weight=3.0)]
    submitted = [await queue.submit(each, 1.0) for _ in range(150) for each in mix]
    for second in range(2, 102):
        for part, running in enumerate((5, 5, 4)):
            now = second + part / 10
            fleet[0] = worker("a", running=running, beat_at=now)
            await queue.place_waiting(now)
    tokens: Counter[str] = Counter()
    for waiting in submitted:
        tokens[waiting.entry.tenant] += waiting.entry.cost if waiting.placed else 0
    assert sum(bool(waiting.placed) for waiting in submitted) == 100
    assert tokens["heavy"] / 3 == pytest.approx(tokens["light"], abs=400)


async def test_more_choices_than_its_share_wait_for_room() -> None:
    queue, _ = queue_of(full_of({"flood": 10}))
    assert await chosen(queue, request(tenant="quiet", n=4)) == "a"
    queue, _ = queue_of(full_of({"flood": 10}))
    assert await chosen(queue, request(tenant="quiet", n=5)) is None


async def test_a_worker_that_does_not_publish_its_tenants_is_full() -> None:
    queue, _ = queue_of(full_of({"flood": 10}, weight=0.0))
    assert await chosen(queue, request(tenant="quiet")) is None


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
