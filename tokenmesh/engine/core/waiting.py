"""Requests that wait for a row, a queue for each tenant."""

from collections.abc import Set

from tokenmesh.engine.core.recent_use import RecentUse
from tokenmesh.engine.core.row_table import RowTable
from tokenmesh.engine.core.service_queue import ServiceQueue
from tokenmesh.engine.request.request import Request


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
