"""EventRecorder: numbers the events of a response and places the items of its output."""

from typing import Any, Final

from tokenmesh.services.gateway.responses.item_ids import output_item_id

Event = dict[str, Any]
Item = dict[str, Any]

NOWHERE: Final[Event] = {}


class EventRecorder:
    """An item in an event is a copy: what it becomes later does not change what was told."""

    def __init__(self, response_id: str) -> None:
        self.output: list[Item] = []
        self._response_id = response_id
        self._events: list[Event] = []
        self._number = 0

    def emit(self, kind: str, place: Event = NOWHERE, /, **fields: Any) -> None:
        """Add an event; `place` holds fields that name the item it is about."""
        self._events.append({"type": kind, "sequence_number": self._number, **place, **fields})
        self._number += 1

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def make_id(self, prefix: str) -> str:
        """The id of something that belongs to the next item."""
        return output_item_id(prefix, self._response_id, len(self.output))

    def add(self, item: Item) -> int:
        """Begin an item; its place in the output."""
        index = len(self.output)
        self.output.append(item)
        self.emit("response.output_item.added", output_index=index, item=item)
        return index

    def change(self, index: int, **fields: Any) -> Item:
        """The item with these fields; events told before keep theirs."""
        item = {**self.output[index], **fields}
        self.output[index] = item
        return item

    def finish(self, index: int, **fields: Any) -> None:
        """The item is complete."""
        item = self.change(index, **fields)
        self.emit("response.output_item.done", output_index=index, item=item)
