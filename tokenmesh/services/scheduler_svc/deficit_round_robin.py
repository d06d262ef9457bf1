"""The order of waiting requests: by priority class, then deficit round robin over tenants.

A tenant's turn adds `quantum * weight` tokens to its credit. Credit that is not spent is kept while
the tenant waits and dropped when its queue is empty. A tenant that floods the queue therefore only
delays itself. No I/O, no clock.
"""

import bisect
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """The facts that decide when a request is served."""

    group: int
    """Its class; entries of a smaller class are served first."""
    tenant: str
    weight: float
    order: tuple[int, int]
    """Its place among the entries of its tenant; unique in a queue."""
    cost: int
    """Estimated tokens."""


@dataclass(slots=True)
class _TenantQueue:
    """The entries of one tenant in one class."""

    gain: float
    """Tokens of one turn."""
    entries: list[QueueEntry] = field(default_factory=list)
    credit: float = 0.0
    has_turn: bool = False

    def first(self, passed: Collection[QueueEntry]) -> QueueEntry | None:
        return next((entry for entry in self.entries if entry not in passed), None)

    def index(self, entry: QueueEntry) -> int:
        return bisect.bisect_left(self.entries, entry.order, key=attrgetter("order"))

    def remove(self, entry: QueueEntry) -> bool:
        index = self.index(entry)
        is_there = self.entries[index : index + 1] == [entry]
        if is_there:
            del self.entries[index]
        return is_there

    def turns(self, entry: QueueEntry) -> int:
        """Return how many more turns it needs for an entry; 0: the current one is enough."""
        missing = entry.cost - self.credit
        if self.has_turn and missing <= 0:
            return 0
        return max(1, math.ceil(missing / self.gain))

    def earn(self, turns: int, entry: QueueEntry) -> None:
        """Add credit, up to the cost of its next entry and one turn: a tenant without room in any
        worker must not collect credit."""
        self.credit = min(self.credit + turns * self.gain, entry.cost + self.gain)


class _Class:
    """The tenants of one priority class."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _TenantQueue] = OrderedDict()
        """In the order of their next turns; the first one may be in its turn."""

    def __len__(self) -> int:
        return sum(len(queue.entries) for queue in self._tenants.values())

    def add(self, entry: QueueEntry, quantum: int) -> None:
        queue = self._tenants.setdefault(entry.tenant, _TenantQueue(0.0))
        queue.gain = quantum * entry.weight
        bisect.insort(queue.entries, entry, key=attrgetter("order"))

    def next(self, passed: Collection[QueueEntry], full: Collection[str]) -> QueueEntry | None:
        found, fewest = None, math.inf
        for tenant, queue in self._tenants.items():
            first = None if tenant in full else queue.first(passed)
            if first is not None and (turns := queue.turns(first)) < fewest:
                found, fewest = first, turns
        return found

    def take(self, entry: QueueEntry) -> None:
        queue = self._tenants[entry.tenant]
        self._advance(queue, entry)
        queue.credit -= entry.cost
        self.remove(entry)
        if queue.entries and queue.credit < queue.entries[0].cost:
            queue.has_turn = False
            self._tenants.move_to_end(entry.tenant)

    def _advance(self, until: _TenantQueue, entry: QueueEntry) -> None:
        """Give all tenants turns until this one can pay for the entry in its own turn."""
        turns = until.turns(entry)
        if not turns:
            return
        for queue in self._tenants.values():
            queue.earn(turns, entry if queue is until else queue.entries[0])
            if queue is until:
                turns -= 1  # the tenants behind it have not had their turn in this round
        while (front := next(iter(self._tenants.values()))) is not until:
            front.has_turn = False
            self._tenants.move_to_end(front.entries[0].tenant)
        until.has_turn = True

    def remove(self, entry: QueueEntry) -> None:
        queue = self._tenants.get(entry.tenant)
        if queue is not None and queue.remove(entry) and not queue.entries:
            del self._tenants[entry.tenant]

    def ahead(self, entry: QueueEntry) -> int:
        """About how many entries are served first, if all tenants weigh the same."""
        queue = self._tenants[entry.tenant]
        index = queue.index(entry)
        others = (each for each in self._tenants.values() if each is not queue)
        return index + sum(min(len(each.entries), index) for each in others)


class DeficitRoundRobin:
    """Entries in the order of service, until they are taken or removed."""

    def __init__(self, quantum: int) -> None:
        """`quantum`: tokens of one turn at weight 1."""
        self._quantum = quantum
        self._classes: dict[int, _Class] = {}

    def add(self, entry: QueueEntry) -> None:
        self._classes.setdefault(entry.group, _Class()).add(entry, self._quantum)

    def next(
        self, passed: Collection[QueueEntry] = (), full: Collection[str] = ()
    ) -> QueueEntry | None:
        """The entry to serve next; changes nothing, `take` charges the tenant.

        Skips the entries `passed` and all entries of the tenants `full`, which cannot be served
        now and must not block others.
        """
        for group in sorted(self._classes):
            found = self._classes[group].next(passed, full)
            if found is not None:
                return found
        return None

    def take(self, entry: QueueEntry) -> None:
        """Remove an entry that is served and charge its tenant."""
        self._classes[entry.group].take(entry)
        self._drop_if_empty(entry.group)

    def remove(self, entry: QueueEntry) -> None:
        """Remove an entry that is not served; no error if already removed."""
        found = self._classes.get(entry.group)
        if found is not None:
            found.remove(entry)
            self._drop_if_empty(entry.group)

    def ahead(self, entry: QueueEntry) -> int:
        """About how many entries are served before this one, which must be queued."""
        before = (found for group, found in self._classes.items() if group < entry.group)
        return sum(len(found) for found in before) + self._classes[entry.group].ahead(entry)

    def _drop_if_empty(self, group: int) -> None:
        if not len(self._classes[group]):
            del self._classes[group]
