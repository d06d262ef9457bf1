"""Events that clients send."""

from typing import Any, Final, Literal

import msgspec
from pydantic import ConfigDict, Field, ValidationError

from tokenmesh.services.gateway.http.json_bounds import check_bounds
from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.errors import NotSupported, invalid_fields
from tokenmesh.services.gateway.realtime.fields import ResponseFields, SessionFields
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput

_MAX_ID_CHARS: Final = 512


class InvalidJson(InvalidInput):
    """A message that is no JSON object."""

    code = "invalid_json"


class UnknownEvent(InvalidInput):
    """An event of a type that does not exist."""

    code = "unknown_event"


class ClientEvent(Bounded):
    """What all have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    event_id: str | None = Field(default=None, max_length=_MAX_ID_CHARS)


class SessionUpdate(ClientEvent):
    """Change how responses are made."""

    session: SessionFields


class ItemCreate(ClientEvent):
    """Add an item behind another one, else at the end."""

    previous_item_id: str | None = None
    item: dict[str, Any]


class ItemRetrieve(ClientEvent):
    """Show an item."""

    item_id: str


class ItemDelete(ClientEvent):
    """Remove an item."""

    item_id: str


class ItemTruncate(ClientEvent):
    """Forget what of the model's words was not heard; of text that can only be all of it."""

    item_id: str
    content_index: int = Field(ge=0)
    audio_end_ms: Literal[0]


class ResponseCreate(ClientEvent):
    """Answer."""

    response: ResponseFields | None = None


class ResponseCancel(ClientEvent):
    """Stop answering."""

    response_id: str | None = None


_MODEL_BY_TYPE: Final[dict[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}
_AUDIO: Final = ("input_audio_buffer.", "output_audio_buffer.")


async def decode_event(text: str, limits: GatewaySettings) -> dict[str, Any]:
    """The object in a message. Raises InvalidJson, and InvalidInput for one with too much in it."""
    data = text.encode("utf-8", "surrogatepass")
    await check_bounds(data, limits)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the event is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidJson("the event is not a JSON object")
    return value


def read_event(value: dict[str, Any]) -> ClientEvent:
    """The event. Raises InvalidInput and its kin."""
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidInput("type is missing", param="type")
    if kind.startswith(_AUDIO):
        raise NotSupported(f"type: {kind[:64]!r}: audio is not supported yet", param="type")
    if kind not in _MODEL_BY_TYPE:
        known = ", ".join(_MODEL_BY_TYPE)
        raise UnknownEvent(f"type: {kind[:64]!r} is unknown; there are: {known}", param="type")
    try:
        return _MODEL_BY_TYPE[kind].model_validate(value)
    except ValidationError as error:
        raise invalid_fields(error) from None
