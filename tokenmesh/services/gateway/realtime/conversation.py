"""RealtimeConversation: a session's items in order, within bounds."""

from collections.abc import Iterator

from tokenmesh.services.gateway.realtime.items import Item
from tokenmesh.shared.config.http import RealtimeSettings
from tokenmesh.shared.errors import Conflict, InvalidInput, NotFound

_ROOT = "root"
"""Where the first item comes after."""


class RealtimeConversation:
    """Items by id and by place."""

    def __init__(self, limits: RealtimeSettings) -> None:
        self._limits = limits
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last_id(self) -> str | None:
        """Of the item at the end."""
        return self._items[-1].id if self._items else None

    def get(self, item_id: str, param: str = "item_id") -> Item:
        """Raises NotFound."""
        for item in self._items:
            if item.id == item_id:
                return item
        raise NotFound(f"{param}: there is no item {item_id[:128]!r}", param=param)

    def add(self, item: Item, previous_id: str | None = None) -> str | None:
        """Insert a client's item behind `previous_id`, else at the end; the id before it.

        Raises InvalidInput, NotFound, Conflict.
        """
        self.check_room(item.num_bytes)
        if any(each.id == item.id for each in self._items):
            raise Conflict(f"item.id: there is an item {item.id!r} already", param="item.id")
        self._check_call(item)
        index = len(self._items)
        if previous_id == _ROOT:
            index = 0
        elif previous_id is not None:
            index = self._items.index(self.get(previous_id, "previous_item_id")) + 1
        self._items.insert(index, item)
        return self._items[index - 1].id if index else None

    def append(self, item: Item) -> str | None:
        """Add what the model begins to write; the id before it."""
        previous_id = self.last_id
        self._items.append(item)
        return previous_id

    def remove(self, item_id: str) -> None:
        """Raises NotFound."""
        self._items.remove(self.get(item_id))

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises InvalidInput when one more item would be over a bound."""
        limits = self._limits
        if len(self._items) >= limits.realtime_max_items:
            raise InvalidInput(
                f"the conversation holds {limits.realtime_max_items} items, delete some first",
                param="item",
            )
        total = sum(item.num_bytes for item in self._items) + num_bytes
        if total > limits.realtime_max_session_bytes:
            raise InvalidInput(
                f"the conversation would have {total} bytes, "
                f"at most {limits.realtime_max_session_bytes}",
                param="item",
            )

    def _check_call(self, item: Item) -> None:
        if item.view["type"] != "function_call_output":
            return
        call_id = item.view["call_id"]
        calls = (each.view for each in self._items if each.view["type"] == "function_call")
        if not any(call["call_id"] == call_id for call in calls):
            raise NotFound(
                f"item.call_id: there is no call {call_id[:128]!r}", param="item.call_id"
            )
