"""RealtimeConversation: the items of a session in order, and the validation of clients' items."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import Field

from tokenmesh.services.gateway.apis.openai.translation import Json, read_object
from tokenmesh.services.gateway.apis.realtime.errors import (
    DuplicateItem,
    UnknownCall,
    UnknownDeletedItem,
    UnknownPreviousItem,
    UnknownRetrievedItem,
    UnknownTruncatedItem,
    UntruncatableItem,
)
from tokenmesh.services.gateway.core.http.errors import (
    MissingField,
    NotSupported,
    WrongType,
    invalid,
)
from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.shared.config.http import RealtimeSettings
from tokenmesh.shared.errors import InvalidInput, NotFound
from tokenmesh.shared.ids import new_request_id

_MAX_ID_CHARS: Final = 128
_ROOT: Final = "root"
"""The `previous_item_id` of the first item."""


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """Audio of an item, stored as an upload."""

    file_id: str
    num_bytes: int


class Item:
    """One item; `view` is its JSON as clients see it."""

    def __init__(self, view: Json, recording: "StoredRecording | None" = None) -> None:
        """`recording`: the audio of the item, for models that hear it."""
        self.view = view
        self.recording = recording
        self._num_bytes: int | None = None

    @property
    def id(self) -> str:
        return str(self.view["id"])

    @property
    def num_bytes(self) -> int:
        """Size of its JSON."""
        if self._num_bytes is None:
            self._num_bytes = len(encode_json(self.view))
        return self._num_bytes

    def change(self, **fields: Any) -> None:
        """Replace fields of the view."""
        self.view = self.view | fields
        self._num_bytes = None


class RealtimeConversation:
    """Items by id and position, within the limits of a session."""

    def __init__(self, settings: RealtimeSettings) -> None:
        self._settings = settings
        self._items: list[Item] = []

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def get(
        self,
        item_id: str,
        param: str = "item_id",
        kind: type[NotFound] = UnknownRetrievedItem,
    ) -> Item:
        """Raises `kind` that names `param`."""
        for item in self._items:
            if item.id == item_id:
                return item
        raise kind(f"{param} {item_id[:128]!r} matches no item", param=param)

    def add(self, item: Item, previous_id: str | None = None) -> str | None:
        """Insert a client's item after `previous_id`, or at the end; returns the id before it.

        Raises InvalidInput, UnknownPreviousItem, UnknownCall, DuplicateItem.
        """
        self.check_room(item.num_bytes)
        if any(each.id == item.id for each in self._items):
            raise DuplicateItem(f"item.id {item.id!r} exists already", param="item.id")
        self._check_call(item)
        index = len(self._items)
        if previous_id == _ROOT:
            index = 0
        elif previous_id is not None:
            previous = self.get(previous_id, "previous_item_id", UnknownPreviousItem)
            index = self._items.index(previous) + 1
        self._items.insert(index, item)
        return self._items[index - 1].id if index else None

    def append(self, item: Item) -> str | None:
        """Add an item that the model begins to write; returns the id before it."""
        previous_id = self._items[-1].id if self._items else None
        self._items.append(item)
        return previous_id

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Remove the text of a part that the model wrote.

        Raises UnknownTruncatedItem, UntruncatableItem, InvalidInput.
        """
        item = self.get(item_id, kind=UnknownTruncatedItem)
        content = [*(item.view.get("content") or [])]
        if item.view.get("role") != "assistant":
            raise invalid("item_id", "is not a message of the model's", UntruncatableItem)
        if content_index >= len(content):
            raise invalid("content_index", "matches no part that the model wrote")
        if audio_end_ms:
            raise invalid("audio_end_ms", "must be 0: answers are text, which has no duration")
        content[content_index] = {**content[content_index], "text": ""}
        item.change(content=content)

    def remove(self, item_id: str) -> None:
        self._items.remove(self.get(item_id, kind=UnknownDeletedItem))

    def check_room(self, num_bytes: int = 0) -> None:
        """Raises InvalidInput when an item of `num_bytes` more would exceed a limit."""
        max_items = self._settings.realtime_max_items
        max_bytes = self._settings.realtime_max_session_bytes
        if len(self._items) >= max_items:
            raise InvalidInput(
                f"the conversation holds {max_items} items, delete some first", param="item"
            )
        total = sum(item.num_bytes for item in self._items) + num_bytes
        if total > max_bytes:
            raise InvalidInput(
                f"the conversation would have {total} bytes, at most {max_bytes} are allowed "
                "(gateway.realtime_max_session_bytes)",
                param="item",
            )

    def recordings(self) -> list[StoredRecording]:
        """Those of all items."""
        return [item.recording for item in self._items if item.recording is not None]

    def check_recording(self, num_bytes: int) -> None:
        """Raises InvalidInput when a recording of so many bytes more would exceed the limit."""
        limit = self._settings.realtime_max_recordings_bytes
        total = sum(each.num_bytes for each in self.recordings()) + num_bytes
        if total > limit:
            raise InvalidInput(
                f"the recordings of the conversation would have {total} bytes, at most {limit} are "
                "allowed: delete items with audio",
                param="audio",
            )

    def _check_call(self, item: Item) -> None:
        if item.view["type"] != "function_call_output":
            return
        call_id = item.view["call_id"]
        calls = (each.view for each in self._items if each.view["type"] == "function_call")
        if not any(call["call_id"] == call_id for call in calls):
            raise UnknownCall(
                f"item.call_id {call_id[:128]!r} matches no function_call", param="item.call_id"
            )


class _Fields(Bounded, extra="forbid", strict=True):
    """`object` and `status` are accepted from clients that copy an item."""

    id: str | None = Field(default=None, min_length=1, max_length=_MAX_ID_CHARS)
    type: str
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class _Message(_Fields):
    role: Literal["system", "user", "assistant"]
    content: list[Json] = Field(min_length=1)


class _Call(_Fields):
    name: str = Field(min_length=1)
    arguments: str
    call_id: str | None = Field(default=None, min_length=1, max_length=_MAX_ID_CHARS)


class _CallOutput(_Fields):
    call_id: str
    output: str


class _Text(Bounded, extra="ignore", strict=True):
    type: Literal["input_text", "output_text"]
    text: str


class _Image(Bounded, extra="ignore", strict=True):
    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high"] | None = None


_FIELDS_BY_TYPE: Final[dict[str, type[_Fields]]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _CallOutput,
}
_PARTS_BY_ROLE: Final = {
    "system": ("input_text",),
    "user": ("input_text", "input_image"),
    "assistant": ("output_text",),
}


def read_item(value: Json, path: str) -> Item:
    """An item that a client sends. Raises InvalidInput that names its path."""
    kind = _type_of(value, path)
    if kind not in _FIELDS_BY_TYPE:
        known = ", ".join(_FIELDS_BY_TYPE)
        problem = f"{kind[:64]!r} is not supported; supported types: {known}"
        raise invalid(f"{path}.type", problem)
    fields = read_object(_FIELDS_BY_TYPE[kind], value, path)
    view = fields.model_dump(exclude_none=True)
    if isinstance(fields, _Message):
        view["content"] = [
            _read_part(part, fields.role, f"{path}.content[{index}]")
            for index, part in enumerate(fields.content)
        ]
    elif isinstance(fields, _Call):
        view.setdefault("call_id", new_request_id("call"))
    view.setdefault("id", new_request_id("item"))
    return Item(view | {"object": "realtime.item", "status": "completed"})


def _type_of(value: Json, path: str) -> str:
    kind = value.get("type")
    if kind is None:
        raise invalid(f"{path}.type", "is missing", MissingField)
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", "must be a string", WrongType)
    return kind


def _read_part(part: Json, role: str, path: str) -> Json:
    kind, allowed = _type_of(part, path), _PARTS_BY_ROLE[role]
    if kind not in allowed:
        is_audio = kind in ("input_audio", "output_audio", "audio")
        why = "append audio to the input_audio_buffer" if is_audio else "not allowed here"
        problem = f"{kind[:64]!r}: {why}; allowed for {role}: {', '.join(allowed)}"
        raise invalid(f"{path}.type", problem, NotSupported if is_audio else InvalidInput)
    model = _Image if kind == "input_image" else _Text
    return read_object(model, part, path).model_dump(exclude_none=True)


def reference_id(value: Json, path: str) -> str | None:
    """The id in an item_reference; None for an item of another type. Raises InvalidInput."""
    if value.get("type") != "item_reference":
        return None
    item_id = value.get("id")
    if not isinstance(item_id, str):
        raise invalid(f"{path}.id", "is missing", MissingField)
    return item_id
