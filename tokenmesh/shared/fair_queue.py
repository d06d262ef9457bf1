"""FairQueue and FairSlots: tenants in turn, by what their work costs.

Start-time fair queueing: an item is tagged with the time at which its flow would have been served
if all flows were served side by side, and the item with the least tag is next. A tenant that sends
little passes one that has sent much, and a tenant that is alone has everything.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from tokenmesh.shared.errors import Overloaded

Item = TypeVar("Item")

_RETRY_AFTER_S: Final = 0.5


@dataclass(slots=True)
class _Flow(Generic[Item]):
    end: float
    """Tag of what comes next."""
    items: deque[tuple[float, Item]] = field(default_factory=deque)
    """With their tags, oldest first."""


class FairQueue(Generic[Item]):
    """Bounded. A flow is what is served in turn: a tenant, mostly."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._num_items = 0
        self._now = 0.0
        self._flows: dict[Hashable, _Flow[Item]] = {}

    def __len__(self) -> int:
        return self._num_items

    def push(self, flow: Hashable, item: Item, cost: float = 1.0) -> Item | None:
        """Queue an item. Returns what a full queue has no room for: the newest item of the flow
        that has the most, which may be this one."""
        refused: Item | None = None
        if self._num_items >= self._max_items:
            largest = max(self._flows, key=lambda each: len(self._flows[each].items), default=flow)
            mine = self._flows.get(flow)
            if largest not in self._flows or (
                mine is not None and len(mine.items) >= len(self._flows[largest].items)
            ):
                return item
            refused = self._flows[largest].items[-1][1]
            self.remove(largest, refused)
        found = self._flows.setdefault(flow, _Flow(self._now))
        start = max(self._now, found.end)
        found.items.append((start, item))
        found.end = start + cost
        self._num_items += 1
        return refused

    def pop(self, may: Callable[[Item], bool] = lambda _: True) -> Item | None:
        """The next item whose turn it is, of the flows whose first one `may`; None: there is none.

        A flow is forgotten with its last item.
        """
        best: tuple[float, Hashable] | None = None
        for name, flow in self._flows.items():
            start, item = flow.items[0]
            if (best is None or start < best[0]) and may(item):
                best = start, name
        if best is None:
            return None
        self._now, name = best
        _, item = self._flows[name].items.popleft()
        self._shrink(name)
        return item

    def drain(self) -> list[Item]:
        """All items, in no order; the queue is empty then."""
        items = [item for flow in self._flows.values() for _, item in flow.items]
        self._flows.clear()
        self._num_items = 0
        return items

    def remove(self, flow: Hashable, item: Item) -> None:
        """Take an item out before its turn; nothing happens when it is not there."""
        found = self._flows.get(flow)
        if found is None:
            return
        for place, (_, each) in enumerate(found.items):
            if each is item:
                del found.items[place]
                self._shrink(flow)
                return

    def _shrink(self, name: Hashable) -> None:
        self._num_items -= 1
        if not self._flows[name].items:
            del self._flows[name]


@dataclass(eq=False, slots=True)
class Grant:
    """A slot, or the wait for one."""

    tenant: str
    is_costly: bool
    ready: asyncio.Future[None]
    has_slot: bool = False


class FairSlots:
    """A number of slots that tenants take in turn."""

    def __init__(
        self,
        purpose: str,
        num_slots: int,
        max_waiting: int,
        *,
        most_each: int | None = None,
        costly: float | None = None,
    ) -> None:
        """`purpose` names the work in errors. `most_each`: slots that a tenant may have at a time;
        work without a tenant, whose name is empty, may have all. Work that costs `costly` or more
        leaves one slot to others, where there are several."""
        self._purpose = purpose
        self._num_slots = num_slots
        self._most_each = num_slots if most_each is None else most_each
        self._costly = costly
        self._most_costly = max(1, num_slots - 1)
        self._waiting: FairQueue[Grant] = FairQueue(max_waiting)
        self._running: dict[str, int] = {}
        self._num_running = 0
        self._num_costly = 0

    @asynccontextmanager
    async def slot(self, tenant: str, cost: float = 1.0) -> AsyncIterator[None]:
        """A slot for the block. Raises Overloaded when too much waits."""
        grant = await self.take(tenant, cost)
        try:
            yield
        finally:
            self.release(grant)

    async def take(self, tenant: str, cost: float = 1.0) -> Grant:
        """A slot that is to be released. Raises Overloaded when too much waits."""
        is_costly = self._costly is not None and cost >= self._costly
        grant = Grant(tenant, is_costly, asyncio.get_running_loop().create_future())
        # A tenant's short work does not wait for its own long one.
        flow = tenant, is_costly
        refused = self._waiting.push(flow, grant, cost)
        if refused is not None and not refused.ready.done():
            refused.ready.set_exception(
                Overloaded(f"too many {self._purpose} wait", retry_after_s=_RETRY_AFTER_S)
            )
        self._grant()
        try:
            await grant.ready
        except BaseException:
            if grant.has_slot:
                self.release(grant)
            else:
                self._waiting.remove(flow, grant)
            raise
        return grant

    def release(self, grant: Grant) -> None:
        """Give a slot back; once is enough."""
        if not grant.has_slot:
            return
        grant.has_slot = False
        self._num_running -= 1
        self._num_costly -= grant.is_costly
        left = self._running[grant.tenant] - 1
        if left:
            self._running[grant.tenant] = left
        else:
            del self._running[grant.tenant]
        self._grant()

    def _grant(self) -> None:
        while self._num_running < self._num_slots:
            grant = self._waiting.pop(self._may_run)
            if grant is None:
                return
            if grant.ready.done():
                continue
            grant.has_slot = True
            self._num_running += 1
            self._num_costly += grant.is_costly
            self._running[grant.tenant] = self._running.get(grant.tenant, 0) + 1
            grant.ready.set_result(None)

    def _may_run(self, grant: Grant) -> bool:
        if grant.is_costly and self._num_costly >= self._most_costly:
            return False
        return not grant.tenant or self._running.get(grant.tenant, 0) < self._most_each
