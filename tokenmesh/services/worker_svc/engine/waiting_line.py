"""WaitingLine: requests that wait for a row; next is a tenant that has had much less than another
lately, then who has the fewest rows for its weight.

Whoever has no row comes before all who have one, the longest waiting first, and who has none for
long has had little lately: nobody starves.
"""

from collections.abc import Set

from tokenmesh.services.worker_svc.engine.queues import ServiceQueue
from tokenmesh.services.worker_svc.engine.recent_use import RecentUse
from tokenmesh.services.worker_svc.engine.request import Request
from tokenmesh.services.worker_svc.engine.row_table import RowTable


class WaitingLine:
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
        """Who waits."""
        return self._queues.keys()

    @property
    def first(self) -> Request:
        """Whose turn it is."""
        heads = [queue.first for queue in self._queues.values()]
        return heads[0] if len(heads) == 1 else min(heads, key=self._turn)

    def add(self, request: Request) -> None:
        """Wait among the tenant's own, by priority and arrival."""
        self._queues.setdefault(request.owner.tenant, ServiceQueue()).add(request)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        """Leave, from wherever; the request must be here."""
        tenant = request.owner.tenant
        self._queues[tenant].remove(request)
        if not len(self._queues[tenant]):
            del self._queues[tenant]
        self._num_requests -= 1

    def _turn(self, request: Request) -> tuple[int, bool, float, int]:
        owner = request.owner
        level = self._rows.by_tenant.get(owner.tenant, 0) / owner.weight
        return owner.group, not self._recent.is_light(owner), level, request.arrival
