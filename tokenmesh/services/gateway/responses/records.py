"""Records: what the log of a response is made of. Written by one gateway, read by any.

Yesterday's logs are read by tomorrow's gateways: a new field has a default, none is renamed or
retyped. One entry of the journal holds one batch of records.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
from pydantic import ValidationError

from tokenmesh.services.gateway.mesh.session import Output
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs
from tokenmesh.shared.tokens import pack_ids, unpack_ids

Status = Literal["completed", "incomplete", "failed", "cancelled"]


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The first record: all that is needed to do the response from its start."""

    id: ResponseId
    owner: GatewayId
    scope: str = ""
    """Not used any more: a response is its tenant's."""
    model: ModelName
    body: bytes
    """The request as JSON."""
    created_s: float
    deadline_s: float
    """Absolute, wall clock."""
    seed: int
    """Of the first turn's sampling."""
    is_background: bool = False
    tenant: str = "default"
    """Whose it is, and who is charged."""

    def request(self) -> ResponsesRequest:
        """The body as it was validated. Raises ProtocolError for what this version cannot read."""
        try:
            return ResponsesRequest.model_validate_json(self.body)
        except ValidationError as error:
            raise ProtocolError(f"the request of {self.id} cannot be read") from error


class Prompted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A turn of the model begins: its prompt, which need not come out the same a second time."""

    turn: int
    packed_ids: bytes
    max_tokens: int
    has_media: bool = False
    """The ids alone are not the prompt."""


class Portion(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An `Output` as it was taken: portions decide where deltas end."""

    token_ids: bytes
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None

    @classmethod
    def of(cls, output: Output) -> "Portion":
        """What a replay needs of an output."""
        return cls(
            pack_ids(output.token_ids),
            output.logprobs,
            output.finish,
            output.stop_token,
            output.cached_tokens,
        )

    def output(self) -> Output:
        """The output again."""
        return Output(
            token_ids=unpack_ids(self.token_ids),
            logprobs=self.logprobs,
            finish=self.finish,
            stop_token=self.stop_token,
            cached_tokens=self.cached_tokens,
        )


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What came at one time, and the events that were made of it."""

    portions: list[Portion] = []
    frames: list[bytes] = []
    """Whole SSE frames. Frames of a log are numbered from 0 on, in order."""


class CallBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A server's tool is about to be called; who finds no `CallEnded` must not call again."""

    item: str
    """The id of the item that the call is in the response."""
    frames: list[bytes] = []


class CallEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What a call brought."""

    item: str
    output: str | None = None
    error: str | None = None
    frames: list[bytes] = []


class ToolsListed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """What a tool server offers; asked once in a response."""

    place: str
    """Path of the tool in the request."""
    tools: bytes
    """JSON."""
    frames: list[bytes] = []


class Adopted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Another gateway goes on; whoever wrote before is fenced off by this very entry."""

    owner: GatewayId
    reason: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The last record."""

    status: Status
    response: bytes
    """The response object as JSON."""
    portions: list[Portion] = []
    frames: list[bytes] = []


Record = Begun | Prompted | Flushed | ToolsListed | CallBegun | CallEnded | Adopted | Ended

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Record])


def encode_record(record: Record) -> bytes:
    """One record by itself."""
    return _encoder.encode(record)


def join_records(encoded: Sequence[bytes]) -> bytes:
    """One entry of the journal."""
    return _encoder.encode([msgspec.Raw(each) for each in encoded])


def decode_records(data: bytes) -> list[Record]:
    """What an entry holds. Raises ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"undecodable record of a response: {error}") from error


def frames_of(record: Record) -> Sequence[bytes]:
    """The events that came with a record."""
    return () if isinstance(record, Begun | Prompted | Adopted) else record.frames
