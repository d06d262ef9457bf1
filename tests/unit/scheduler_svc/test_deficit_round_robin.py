"""A tenant that floods the queue delays only itself: shares, order and no starvation."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenmesh.services.scheduler_svc.deficit_round_robin import DeficitRoundRobin, QueueEntry

QUANTUM = 100
TENANTS = ("a", "b", "c")


def entry(
    tenant: str, number: int, cost: int = 50, weight: float = 1.0, group: int = 0
) -> QueueEntry:
    return QueueEntry(group, tenant, weight, (0, number), cost)


def served(queue: DeficitRoundRobin, count: int) -> list[QueueEntry]:
    taken = []
    for _ in range(count):
        found = queue.next()
        if found is None:
            break
        queue.take(found)
        taken.append(found)
    return taken


def test_a_newcomer_is_served_next_to_a_tenant_that_floods() -> None:
    queue = DeficitRoundRobin(QUANTUM)
    for number in range(1000):
        queue.add(entry("flood", number))
    served(queue, 3)
    queue.add(entry("quiet", 2000))
    assert "quiet" in [each.tenant for each in served(queue, 2)]


def test_a_class_is_served_before_the_next_one() -> None:
    queue = DeficitRoundRobin(QUANTUM)
    queue.add(entry("a", 1, group=1))
    queue.add(entry("b", 2, cost=10**6, group=-1))
    assert [each.tenant for each in served(queue, 2)] == ["b", "a"]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.5, 2.5)])
@given(costs=st.lists(st.integers(1, 400), min_size=40, max_size=40))
def test_tokens_are_shared_by_weight_for_any_cost(
    weights: tuple[float, float], costs: list[int]
) -> None:
    queue = DeficitRoundRobin(QUANTUM)
    for index in range(400):
        for tenant, weight in zip("ab", weights, strict=True):
            cost = costs[index % 40] if tenant == "a" else costs[-1 - index % 40]
            queue.add(entry(tenant, 2 * index + (tenant == "b"), cost, weight))
    tokens: Counter[str] = Counter()
    for each in served(queue, 200):
        tokens[each.tenant] += each.cost
    # Each may be one turn and one request ahead of its share.
    behind = abs(tokens["a"] / weights[0] - tokens["b"] / weights[1])
    assert behind <= 2 * (QUANTUM + 400 / min(weights))


@given(cost=st.integers(1, 10**7), weight=st.floats(0.01, 100))
def test_a_request_of_any_cost_is_served_in_bounded_work(cost: int, weight: float) -> None:
    queue = DeficitRoundRobin(QUANTUM)
    queue.add(entry("a", 1, cost, weight))
    queue.add(entry("b", 2, 10**7, 0.01))
    assert queue.next() is not None


@given(flood=st.integers(1, 60), cost=st.integers(1, 500), big=st.integers(1, 2000))
def test_no_entry_waits_for_more_than_the_turns_of_others(flood: int, cost: int, big: int) -> None:
    queue = DeficitRoundRobin(QUANTUM)
    for number in range(flood):
        queue.add(entry("flood", number, cost))
    queue.add(entry("quiet", 1000, big))
    before = 0
    while (found := queue.next()) is not None and found.tenant != "quiet":
        queue.take(found)
        before += found.cost
    assert found is not None
    assert before <= big + 2 * QUANTUM + cost


def test_an_entry_that_cannot_be_served_blocks_no_other_and_collects_no_credit() -> None:
    queue = DeficitRoundRobin(QUANTUM)
    wide = entry("a", 1, 300)
    queue.add(wide)
    for number in range(2, 100):
        queue.add(entry("b", number))
    for _ in range(50):
        assert queue.next() in (wide, queue.next({wide}))
        other = queue.next({wide})
        assert other is not None
        assert other.tenant == "b"
        queue.take(other)
    for number in range(200, 220):
        queue.add(entry("a", number))
    tenants = Counter(each.tenant for each in served(queue, 20))
    assert tenants["b"] >= 4


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
@given(
    costs=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    attempts=st.lists(st.integers(0, 3), min_size=10, max_size=10),
)
def test_attempts_that_find_no_room_change_no_share(
    weights: tuple[float, float], costs: tuple[int, int], attempts: list[int]
) -> None:
    queue = DeficitRoundRobin(QUANTUM)
    for number in range(400):
        for index, tenant in enumerate("ab"):
            queue.add(entry(tenant, 2 * number + index, costs[index], weights[index]))
    tokens: Counter[str] = Counter()
    for number in range(200):
        for _ in range(attempts[number % 10]):
            full: set[str] = set()
            while (found := queue.next(full=full)) is not None:
                full.add(found.tenant)
        for each in served(queue, 1):
            tokens[each.tenant] += each.cost
    behind = abs(tokens["a"] / weights[0] - tokens["b"] / weights[1])
    assert behind <= 2 * (QUANTUM + 400)


class AnyOrder(RuleBasedStateMachine):
    """Entries are added, served and removed in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = DeficitRoundRobin(QUANTUM)
        self.there: list[QueueEntry] = []
        self.count = 0

    @rule(tenant=st.sampled_from(TENANTS), cost=st.integers(1, 1000), group=st.integers(0, 1))
    def add(self, tenant: str, cost: int, group: int) -> None:
        self.count += 1
        new = entry(tenant, self.count, cost, 1.0 + TENANTS.index(tenant), group)
        self.queue.add(new)
        self.there.append(new)

    @rule()
    def serve(self) -> None:
        found = self.queue.next()
        assert found == self.queue.next()
        if found is None:
            return
        assert found.group == min(each.group for each in self.there)
        same = [e for e in self.there if (e.tenant, e.group) == (found.tenant, found.group)]
        assert found == same[0]
        self.queue.take(found)
        self.there.remove(found)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.there:
            gone = data.draw(st.sampled_from(self.there))
            self.there.remove(gone)
            self.queue.remove(gone)
            self.queue.remove(gone)

    @invariant()
    def holds_what_is_there(self) -> None:
        for tenant in TENANTS:
            others = [name for name in TENANTS if name != tenant]
            is_there = any(each.tenant == tenant for each in self.there)
            assert (self.queue.next(full=others) is not None) == is_there
        for each in self.there:
            assert 0 <= self.queue.ahead(each) < len(self.there)
        assert (self.queue.next() is None) == (not self.there)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40)
