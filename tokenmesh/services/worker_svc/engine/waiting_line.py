"""WaitingLine: requests that wait for a row, first the tenant with the fewest rows for its weight.

Whoever has no row comes before everybody who has one, the longest waiting first: nobody starves.
"""

from collections.abc import Set

from tokenmesh.services.worker_svc.engine.queues import ServiceQueue
from tokenmesh.services.worker_svc.engine.request import Request
from tokenmesh.services.worker_svc.engine.row_table import RowTable


class WaitingLine:
    """One queue for each tenant that waits."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
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

    def _turn(self, request: Request) -> tuple[int, float, int]:
        owner = request.owner
        return owner.group, self._rows.num_of(owner.tenant) / owner.weight, request.arrival
