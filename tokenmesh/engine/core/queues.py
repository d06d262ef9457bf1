"""Requests in service order: priority first (smaller is sooner), then arrival.

A preempted request keeps its arrival, so it comes back before all that came later.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from operator import attrgetter
from typing import Final

from tokenmesh.engine.core.plan import StepPlan
from tokenmesh.engine.core.request import Request, Status, TenantShare
from tokenmesh.engine.core.row_table import RowTable
from tokenmesh.engine.kv.block_pool import BlockPool
from tokenmesh.engine.kv.block_tables import BlockTables
from tokenmesh.shared.tenant_share import MUCH_LESS

_STEPS: Final = 512
"""How far back the moving average looks, about."""
_NOTHING: Final = 1e-4
"""Below it a tenant is forgotten."""

service_order = attrgetter("order")
"""Sorts requests."""


class ServiceQueue:
    """A sorted list; the scheduler keeps one of waiting and one of running requests."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """First served first. `pop_last` is allowed meanwhile."""
        return iter(self._requests)

    @property
    def first(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Take the place that priority and arrival give."""
        if self._requests and self._requests[-1].order > request.order:
            insort(self._requests, request, key=service_order)
        else:
            self._requests.append(request)

    def remove(self, request: Request) -> None:
        """The request must be in the queue."""
        index = bisect_left(self._requests, request.order, key=service_order)
        assert self._requests[index] is request
        del self._requests[index]

    def pop_last(self) -> Request:
        """Remove and return the one that is served last."""
        return self._requests.pop()


class RecentUse:
    """Moving averages of rows and prefill tokens, as shares of what a step has, by tenant."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._uses: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    @property
    def levels(self) -> dict[str, float]:
        return {tenant: use / self._weights[tenant] for tenant, use in self._uses.items()}

    def note(self, rows: Mapping[str, int], prefills: Iterable[tuple[TenantShare, int]]) -> None:
        """A step: rows that tenants hold, and tokens of prefill."""
        shares = {tenant: number / self._max_rows for tenant, number in rows.items()}
        for owner, num_tokens in prefills:
            self._meet(owner)
            shares[owner.tenant] = shares.get(owner.tenant, 0.0) + num_tokens / self._max_tokens
        for tenant, use in list(self._uses.items()):
            self._uses[tenant] = use + (shares.get(tenant, 0.0) - use) / _STEPS
            if self._uses[tenant] < _NOTHING and tenant not in rows:
                del self._uses[tenant], self._weights[tenant]

    def is_lighter(self, owner: TenantShare, other: TenantShare) -> bool:
        """Whether it has had much less than the other, by weight."""
        if owner.tenant not in self._uses or other.tenant not in self._uses:
            return False
        return self._level(owner) < MUCH_LESS * self._level(other)

    def is_light(self, owner: TenantShare) -> bool:
        """Whether it has had much less than the heaviest."""
        most = max(self.levels.values(), default=0.0)
        return owner.tenant in self._uses and self._level(owner) < MUCH_LESS * most

    def _level(self, owner: TenantShare) -> float:
        return self._uses[owner.tenant] / owner.weight

    def _meet(self, owner: TenantShare) -> None:
        """A newcomer begins as the heaviest: it has to earn its credit."""
        if owner.tenant not in self._uses:
            most = max(self.levels.values(), default=0.0)
            self._uses[owner.tenant] = most * owner.weight
        self._weights[owner.tenant] = owner.weight


class WaitingRequests:
    """One queue for each tenant that waits."""

    def __init__(self, rows: RowTable, recent: RecentUse) -> None:
        self._rows = rows
        self._recent = recent
        self._queues: dict[str, ServiceQueue] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    @property
    def tenants(self) -> Set[str]:
        """Tenants with waiting requests."""
        return self._queues.keys()

    @property
    def first(self) -> Request:
        heads = [queue.first for queue in self._queues.values()]
        return heads[0] if len(heads) == 1 else min(heads, key=self._turn)

    def add(self, request: Request) -> None:
        """Wait among the tenant's own, by priority and arrival."""
        self._queues.setdefault(request.spec.owner.tenant, ServiceQueue()).add(request)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        """The request must be in the queue."""
        tenant = request.spec.owner.tenant
        self._queues[tenant].remove(request)
        if not len(self._queues[tenant]):
            del self._queues[tenant]
        self._num_requests -= 1

    def _turn(self, request: Request) -> tuple[int, bool, float, int]:
        owner = request.spec.owner
        level = self._rows.by_tenant.get(owner.tenant, 0) / owner.weight
        return owner.group, not self._recent.is_light(owner), level, request.place.arrival


class BlockReclaimer:
    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        running: ServiceQueue,
        rows: RowTable,
        requeue: Callable[[Request], None],
    ) -> None:
        """`requeue`: sends a request that has left the running ones back to wait."""
        self._pool = pool
        self._tables = tables
        self._running = running
        self._rows = rows
        self._requeue = requeue

    def make(self, request: Request, num_blocks: int) -> bool:
        """That many free blocks; False when it is `request` itself that has to give way."""
        while self._pool.num_free < num_blocks:
            victim = self._running.pop_last()
            self._rows.expect_late(victim)
            self._requeue(victim)
            if victim is request:
                return False
        return True

    def advance_windows(self, prefilling: ServiceQueue) -> None:
        """Blocks of the window groups for the next chunk of each prompt.

        Before rows are put into the step's plan, because some may have to give way.
        """
        for request in list(prefilling):
            if request.place.status is not Status.RUNNING:
                continue  # it has given way to one before it
            missing = self._tables.missing(request)
            if missing and self.make(request, missing):
                self._tables.advance(request)


def fits_step(request: Request, budget: int, plan: StepPlan) -> bool:
    """Whether the step has room for it. A prompt that cannot be cut may exceed the budget alone."""
    return not request.spec.is_whole or request.num_known <= budget or not plan.num_rows
