"""Rows, blocks and prefill of a worker among tenants: by weight. A tenant may exceed its
share while no other needs it."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_svc.test_scheduler import Bench, with_settings
from tokenmesh.engine.core.recent_use import RecentUse
from tokenmesh.engine.core.sharing import split
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.engine.request.spec import TenantShare

MakeRequest = Callable[..., Request]
FLOOD = TenantShare("flood")
QUIET = TenantShare("quiet")


class Tenants:
    """A bench, and who has how many rows."""

    def __init__(self, make_request: MakeRequest, num_blocks: int = 64, **changed: float) -> None:
        self.bench = Bench(with_settings(**changed), num_blocks)
        self.requests: list[Request] = []
        self._make = make_request

    def add(
        self, owner: TenantShare, count: int = 1, length: int = 1, max_tokens: int = 50
    ) -> None:
        for _ in range(count):
            number = len(self.requests)
            prompt = [number + 1] * length
            request = self._make(number, prompt, max_tokens=max_tokens, owner=owner)
            self.requests.append(request)
            self.bench.add(request)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.bench.step()

    @property
    def rows(self) -> Counter[str]:
        running = (each for each in self.requests if each.place.status is Status.RUNNING)
        return Counter(request.spec.owner.tenant for request in running)


def test_a_tenant_alone_uses_everything(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request)
    tenants.add(FLOOD, 9)
    tenants.step(3)
    assert tenants.rows == {"flood": 4}


def test_a_newcomer_takes_its_share_of_the_rows_one_a_step(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request)
    tenants.add(FLOOD, 9)
    tenants.step(2)
    tenants.add(QUIET, 9)
    tenants.step()
    assert tenants.rows == {"flood": 3, "quiet": 1}
    tenants.step(5)
    assert tenants.rows == {"flood": 2, "quiet": 2}
    assert tenants.bench.scheduler.notes.preempted == []


def test_the_latest_request_gives_way_and_comes_back_first(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request)
    tenants.add(FLOOD, 6)
    tenants.step(2)
    tenants.add(QUIET)
    tenants.step()
    assert tenants.bench.scheduler.notes.preempted == [tenants.requests[3]]
    tenants.bench.scheduler.remove(tenants.requests[6])
    tenants.step()
    assert tenants.requests[3].place.status is Status.RUNNING
    assert tenants.requests[4].place.status is Status.WAITING


def test_a_weight_is_a_share(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request, max_num_seqs=8, max_num_batched_tokens=32)
    tenants.add(FLOOD, 20)
    tenants.step(2)
    tenants.add(TenantShare("heavy", weight=3.0), 20)
    tenants.step(12)
    assert tenants.rows == {"heavy": 6, "flood": 2}


def test_a_lesser_class_takes_nothing_from_a_greater_one(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request)
    tenants.add(FLOOD, 4)
    tenants.step(2)
    tenants.add(TenantShare("batch", group=1))
    tenants.step(3)
    assert tenants.rows == {"flood": 4}


def test_blocks_are_taken_from_a_tenant_above_its_share(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request, num_blocks=17, max_num_batched_tokens=64)
    tenants.add(FLOOD, 3, length=18, max_tokens=8)
    tenants.step(2)
    tenants.add(QUIET, length=18, max_tokens=8)
    tenants.step()
    assert tenants.rows == {"flood": 2, "quiet": 1}


def test_running_requests_that_grow_take_from_the_heaviest(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request, num_blocks=8, max_num_batched_tokens=64)
    tenants.add(FLOOD, 2, length=8, max_tokens=8)
    tenants.add(QUIET, length=8, max_tokens=8)
    tenants.step(2)
    assert tenants.rows == {"flood": 1, "quiet": 1}


def test_a_long_prompt_of_one_tenant_does_not_hold_up_the_prompt_of_another(
    make_request: MakeRequest,
) -> None:
    tenants = Tenants(make_request)
    tenants.add(FLOOD, length=100)
    tenants.step()
    tenants.add(QUIET, length=6)
    tenants.step()
    assert tenants.requests[1].num_known == 7
    # what the other did not ask for was not lost
    assert tenants.requests[0].num_computed == 16 + 10


def test_after_being_quiet_a_burst_may_take_more_than_its_share(make_request: MakeRequest) -> None:
    tenants = Tenants(make_request, num_blocks=2000)
    tenants.add(FLOOD, 12, max_tokens=4000)
    tenants.add(QUIET, max_tokens=3)
    tenants.step(800)
    tenants.add(QUIET, 9, max_tokens=4000)
    tenants.step(3)
    assert tenants.rows == {"quiet": 3, "flood": 1}
    # it does not stay so
    tenants.step(600)
    assert tenants.rows == {"quiet": 2, "flood": 2}


def test_a_newcomer_has_no_credit() -> None:
    recent = RecentUse(max_rows=4, max_tokens=16)
    for _ in range(100):
        recent.note({"quiet": 1}, [(QUIET, 1)])
    recent.note({"quiet": 1, "flood": 3}, [(FLOOD, 16)])
    assert not recent.is_lighter(FLOOD, QUIET)
    for _ in range(5000):
        recent.note({"flood": 3}, [])
    assert list(recent.levels) == ["flood"]


@given(
    total=st.integers(0, 5000),
    demands=st.dictionaries(
        st.sampled_from("abcdef"), st.tuples(st.integers(1, 3000), st.floats(0.01, 100)), min_size=1
    ),
)
def test_a_step_is_split_by_weight_and_nothing_is_left(
    total: int, demands: dict[str, tuple[int, float]]
) -> None:
    shares = split(total, demands)
    assert shares.keys() == demands.keys()
    weight = sum(weight for _, weight in demands.values())
    for tenant, (asked, own) in demands.items():
        assert 1 <= shares[tenant] <= asked
        # the one token that every tenant gets may come from another's share
        assert shares[tenant] >= min(asked, int(total * own / weight)) - len(demands)
    wanted = min(total, sum(asked for asked, _ in demands.values()))
    assert wanted - len(demands) <= sum(shares.values()) <= max(wanted, total) + len(demands)


@pytest.mark.parametrize("num_tenants", [2, 3, 7])
def test_every_tenant_is_served_in_the_end(make_request: MakeRequest, num_tenants: int) -> None:
    tenants = Tenants(make_request, max_num_seqs=2)
    owners = [TenantShare(str(each), weight=1 + 9 * each) for each in range(num_tenants)]
    for owner in owners:
        tenants.add(owner, 6, length=20, max_tokens=12)
    for _ in range(3000):
        tenants.step()
        for request in tenants.requests:
            if request.place.status is Status.RUNNING and request.num_known >= request.spec.max_len:
                tenants.bench.scheduler.remove(request)
    assert all(request.place.status is Status.ENDED for request in tenants.requests)
