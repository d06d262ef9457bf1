"""Records of a response's event log. Any gateway may read what another has written.

Gateways read logs of earlier versions: a new field has a default, and no field is renamed or
retyped. One entry of the journal holds a batch of records.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from pydantic import ValidationError

from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.core.generation.chunk import Output
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs
from tokenmesh.shared.tokens import pack_ids, unpack_ids

Status = Literal["completed", "incomplete", "failed", "cancelled"]


class ResponseBegun(msgspec.Struct, frozen=True, kw_only=True, tag="Begun", omit_defaults=True):
    """The first record: all that is needed to generate the response from its start."""

    id: ResponseId
    owner: GatewayId
    scope: str = ""
    """Unused since responses belong to tenants."""
    model: ModelName
    body: bytes
    """The request as JSON."""
    created_s: float
    deadline_s: float
    """Absolute, wall clock."""
    seed: int
    """Seed of the first turn's sampling."""
    is_background: bool = False
    tenant: str = "default"
    """The tenant that owns the response and is charged for it."""
    history_items: int = 0
    """Items of its conversation that were there when it began."""

    def request(self) -> ResponsesRequest:
        """The request. Raises ProtocolError if this version cannot read it."""
        try:
            return ResponsesRequest.model_validate_json(self.body)
        except ValidationError as error:
            raise ProtocolError(f"the request of {self.id} cannot be read") from error


class Prompted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A model turn begins. Its prompt is recorded, as rendering it again may give another one."""

    turn: int
    packed_ids: bytes
    max_tokens: int
    has_media: bool = False
    """The prompt also has media, which the ids do not contain."""
    media_tokens: dict[str, int] = {}
    """Tokens that stand for them, by modality."""


class Portion(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An `Output` as it was received: the boundaries of deltas depend on it."""

    token_ids: bytes
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of(cls, output: Output) -> "Portion":
        """The fields of an output that a replay needs."""
        return cls(
            pack_ids(output.token_ids),
            output.logprobs,
            output.finish,
            output.stop_token,
            output.cached_tokens,
        )

    def output(self) -> Output:
        return Output(
            token_ids=unpack_ids(self.token_ids),
            logprobs=self.logprobs,
            finish=self.finish,
            stop_token=self.stop_token,
            cached_tokens=self.cached_tokens,
        )


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Outputs that arrived together, and the events generated from them."""

    portions: list[Portion] = []
    frames: list[bytes] = []
    """SSE frames. The frames of a log are numbered from 0."""


class CallBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """An MCP call is about to be made; without a `CallEnded` it must not be made again."""

    item: str
    """Id of the call's item in the output."""
    frames: list[bytes] = []


class CallEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Result of an MCP call."""

    item: str
    output: str | None = None
    error: str | None = None
    frames: list[bytes] = []


class ToolsListed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The tools of an MCP server; listed once in a response."""

    place: str
    """Path of the server in the request."""
    tools: bytes
    """JSON."""
    frames: list[bytes] = []


class Adopted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Another gateway continues. This entry fences off the previous writer."""

    owner: GatewayId
    reason: str


class ResponseEnded(msgspec.Struct, frozen=True, kw_only=True, tag="Ended", omit_defaults=True):
    """The last record: the response as it is kept."""

    status: Status
    response: bytes
    """The Response object as JSON."""
    portions: list[Portion] = []
    frames: list[bytes] = []


Record = (
    ResponseBegun
    | Prompted
    | Flushed
    | ToolsListed
    | CallBegun
    | CallEnded
    | Adopted
    | ResponseEnded
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Record])


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def join_records(encoded: Sequence[bytes]) -> bytes:
    """One entry of the journal from encoded records."""
    return _encoder.encode([msgspec.Raw(each) for each in encoded])


def decode_records(data: bytes) -> list[Record]:
    """The records of an entry. Raises ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a record of a response cannot be decoded: {error}") from error


def frames_of(record: Record) -> Sequence[bytes]:
    """The SSE frames of a record."""
    return () if isinstance(record, ResponseBegun | Prompted | Adopted) else record.frames
