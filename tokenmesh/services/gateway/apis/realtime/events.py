"""Channel: sends and receives events over a websocket, with a deadline for each write.

Below it are the events that clients send, and the fields of sessions and responses in them.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field
from starlette.websockets import WebSocket, WebSocketDisconnect

from tokenmesh.services.gateway.apis.openai.sampling_fields import in_range
from tokenmesh.services.gateway.apis.openai.translation import Json, read_object
from tokenmesh.services.gateway.apis.realtime.errors import BinaryEvent, InvalidJson, error_view
from tokenmesh.services.gateway.core.http.body import check_bounds
from tokenmesh.services.gateway.core.http.errors import (
    MissingField,
    NotSupported,
    WrongType,
    invalid,
)
from tokenmesh.services.gateway.core.http.fields import INT32_MAX, Bounded
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.shared.config.http import BodySettings
from tokenmesh.shared.errors import Cancelled, InvalidInput, TokenMeshError


class Channel:
    """One accepted websocket. Every method raises Cancelled when the client has disconnected."""

    def __init__(self, websocket: WebSocket, write_timeout_s: float) -> None:
        self._websocket = websocket
        self._write_timeout_s = write_timeout_s
        self._num_events = 0
        self.translated: Callable[[Json], Json | None] | None = None
        """An event in the client's dialect, or None if it has no such event; unset: OpenAI's."""

    async def receive(self, timeout_s: float) -> str:
        """The next message. Raises TimeoutError, and BinaryEvent."""
        async with asyncio.timeout(timeout_s):
            message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise Cancelled("the client left")
        text = message.get("text")
        if text is None:
            raise BinaryEvent("send events as text messages, not as binary ones")
        return str(text)

    async def send(self, *events: dict[str, Any]) -> None:
        """Send events in order. A client that blocks longer than the deadline is disconnected."""
        await self.send_all(deque(events))

    async def send_all(self, events: deque[dict[str, Any]]) -> None:
        """Send events in order; each is removed once sent: a cancelled caller keeps the rest.

        One that is translated is removed before, since it changes what later ones become.
        """
        try:
            async with asyncio.timeout(self._write_timeout_s):
                while events:
                    if self.translated is not None:
                        await self._send_translated(self.translated(events.popleft()))
                        continue
                    self._num_events += 1
                    data = encode_json({"event_id": f"event_{self._num_events}", **events[0]})
                    await self._websocket.send_text(data.decode())
                    events.popleft()
        except (TimeoutError, WebSocketDisconnect) as error:
            raise Cancelled("the client does not read its events") from error

    async def _send_translated(self, event: Json | None) -> None:
        if event is not None:
            await self._websocket.send_text(encode_json(event).decode())

    async def send_error(self, error: TokenMeshError, event_id: str | None = None) -> None:
        """Report an error of the client's event `event_id`; the session continues."""
        fields = {**error_view(error), "param": error.param, "event_id": event_id}
        await self.send({"type": "error", "error": fields})

    async def close(self, code: int) -> None:
        """Close the websocket if the client is still connected."""
        with suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(self._write_timeout_s):
                await self._websocket.close(code)


_MAX_ID_CHARS: Final = 512


class RealtimeTool(Bounded, extra="allow", strict=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: Json | None = None


class _Strict(Bounded, extra="forbid", strict=True, allow_inf_nan=False):
    """Unknown fields are errors."""


class RealtimeReasoning(_Strict):
    effort: str | None = None


class GenerationFields(_Strict):
    """Fields of both sessions and responses. None: unchanged."""

    instructions: str | None = None
    output_modalities: list[Literal["text", "audio"]] | None = None
    tools: list[RealtimeTool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | Literal["inf"] | None = None
    temperature: Annotated[float, in_range("temperature")] | None = None
    reasoning: RealtimeReasoning | None = None

    audio: Json | None = None
    """Read by `audio_config`; of a response it is refused."""
    prompt: Json | None = None
    """Refused by `check_served`."""


class SessionFields(GenerationFields):
    """The session of a session.update."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str | None = None
    include: list[str] | None = None
    tracing: Any = None
    truncation: Any = None


class ResponseFields(GenerationFields):
    """The response of a response.create."""

    conversation: str | None = None
    """`none`: the response is not added to the conversation."""
    input: list[Json] | None = None
    """Items to respond to instead of the conversation."""
    metadata: dict[str, str] | None = None


class ClientEvent(Bounded, extra="forbid", strict=True):
    """Fields of every event."""

    type: str
    event_id: str | None = Field(default=None, max_length=_MAX_ID_CHARS)


class SessionUpdate(ClientEvent):
    """Change how responses are generated."""

    session: SessionFields


class ItemCreate(ClientEvent):
    """Insert an item after `previous_item_id`, or at the end."""

    previous_item_id: str | None = None
    item: Json


class ItemRetrieve(ClientEvent):
    item_id: str


class ItemDelete(ClientEvent):
    item_id: str


class ItemTruncate(ClientEvent):
    """Remove the model's output that was not played; of text that is always all of it."""

    item_id: str
    content_index: int = Field(ge=0)
    audio_end_ms: int = Field(ge=0)


class ResponseCreate(ClientEvent):
    response: ResponseFields | None = None


class AudioAppend(ClientEvent):
    """More input audio, as base64."""

    audio: str


class AudioCommit(ClientEvent):
    """It holds what was appended becomes an item."""


class AudioClear(ClientEvent):
    """Forget what was appended."""


class ResponseCancel(ClientEvent):
    response_id: str | None = None


_MODEL_BY_TYPE: Final[dict[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
}
_AUDIO: Final = "output_audio_buffer."


async def decode_event(text: str, settings: BodySettings) -> Json:
    """The object in a message. Raises InvalidJson."""
    data = text.encode("utf-8", "surrogatepass")
    try:
        await check_bounds(data, settings)
    except InvalidInput as error:
        raise InvalidJson(error.message) from error
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the event is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidJson("the event is not a JSON object")
    return value


def read_event(value: Json) -> ClientEvent:
    """The validated event. Raises InvalidInput."""
    kind = value.get("type")
    if kind is None:
        raise invalid("type", "is missing", MissingField)
    if not isinstance(kind, str):
        raise invalid("type", "must be a string", WrongType)
    if kind.startswith(_AUDIO):
        raise invalid("type", f"{kind[:64]!r}: answers are text", NotSupported)
    if kind not in _MODEL_BY_TYPE:
        known = ", ".join(_MODEL_BY_TYPE)
        raise invalid("type", f"{kind[:64]!r} is unknown; known types: {known}")
    return read_object(_MODEL_BY_TYPE[kind], value, "")


def check_served(fields: GenerationFields, path: str) -> None:
    """Raises NotSupported for fields and values that this version does not serve."""
    if fields.audio and not isinstance(fields, SessionFields):
        raise _not_supported(f"{path}.audio")
    if fields.output_modalities not in (None, ["text"]):
        problem = "must be ['text']: answers are text"
        raise invalid(f"{path}.output_modalities", problem, NotSupported)
    for name in ("prompt", "include", "tracing"):
        if getattr(fields, name, None):
            raise _not_supported(f"{path}.{name}")
    if isinstance(fields, SessionFields) and fields.truncation not in (None, "disabled"):
        raise _not_supported(f"{path}.truncation", "other than 'disabled' ")
    _check_choice(fields.tool_choice, f"{path}.tool_choice")
    names = [tool.name for tool in fields.tools or ()]
    if len(set(names)) < len(names):
        raise invalid(f"{path}.tools", "must have different names")


def _check_choice(choice: str | Json | None, path: str) -> None:
    if choice is None or choice in ("auto", "none", "required"):
        return
    if isinstance(choice, dict) and choice.get("type") == "mcp":
        raise _not_supported(f"{path}.type", "'mcp' ")
    if not (isinstance(choice, dict) and choice.get("type") == "function" and choice.get("name")):
        form = '{"type": "function", "name": ...}'
        raise invalid(path, f"must be 'auto', 'none', 'required' or {form}")


def _not_supported(path: str, what: str = "") -> InvalidInput:
    return invalid(path, f"{what}is not supported yet", NotSupported)
