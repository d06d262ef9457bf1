"""Items: what a conversation consists of, as clients send and see them."""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.errors import NotSupported, invalid_fields
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import new_request_id

Json = dict[str, Any]

_MAX_ID_CHARS: Final = 128


class Item:
    """One item; `view` is what clients see."""

    def __init__(self, view: Json) -> None:
        self.view = view
        self._num_bytes: int | None = None

    @property
    def id(self) -> str:
        """Of the item."""
        return str(self.view["id"])

    @property
    def num_bytes(self) -> int:
        """As JSON."""
        if self._num_bytes is None:
            self._num_bytes = len(encode_json(self.view))
        return self._num_bytes

    def change(self, **fields: Any) -> None:
        """Replace some of what clients see."""
        self.view = self.view | fields
        self._num_bytes = None


class _Fields(Bounded):
    """`object` and `status` come back from clients that copy an item."""

    model_config = ConfigDict(extra="forbid", strict=True)

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


class _Text(Bounded):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text"]
    text: str


class _Image(Bounded):
    model_config = ConfigDict(extra="ignore", strict=True)

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


def read_item(value: Json, place: str) -> Item:
    """An item that a client sends. Raises InvalidInput that names the place."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS_BY_TYPE:
        known = ", ".join(_FIELDS_BY_TYPE)
        raise NotSupported(
            f"{place}.type: {str(kind)[:64]!r} is not supported; possible: {known}",
            param=f"{place}.type",
        )
    fields = _read(_FIELDS_BY_TYPE[kind], value, place)
    view = fields.model_dump(exclude_none=True)
    if isinstance(fields, _Message):
        view["content"] = [
            _read_part(part, fields.role, f"{place}.content[{index}]")
            for index, part in enumerate(fields.content)
        ]
    elif isinstance(fields, _Call):
        view.setdefault("call_id", new_request_id("call"))
    view.setdefault("id", new_request_id("item"))
    return Item(view | {"object": "realtime.item", "status": "completed"})


def _read_part(part: Json, role: str, place: str) -> Json:
    kind, allowed = part.get("type"), _PARTS_BY_ROLE[role]
    if kind not in allowed:
        is_audio = kind in ("input_audio", "output_audio", "audio")
        why = "audio is not supported yet" if is_audio else "cannot stand here"
        raise NotSupported(
            f"{place}.type: {str(kind)[:64]!r}: {why}; possible for {role}: {', '.join(allowed)}",
            param=f"{place}.type",
        )
    model = _Image if kind == "input_image" else _Text
    return _read(model, part, place).model_dump(exclude_none=True)


def _read(model: type[BaseModel], value: Json, place: str) -> BaseModel:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error, place) from None


def reference_id(value: Json, place: str) -> str | None:
    """The id, if this is an item_reference. Raises InvalidInput."""
    if value.get("type") != "item_reference":
        return None
    item_id = value.get("id")
    if not isinstance(item_id, str):
        raise InvalidInput(f"{place}.id is missing", param=f"{place}.id")
    return item_id
