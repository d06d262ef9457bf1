"""Entries of a batch's log. Any gateway may read what another has written.

A new field has a default, and no field is renamed or retyped.
"""

from typing import Final, Literal

import msgspec

from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import GatewayId

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Ending = Literal["completed", "failed", "expired", "cancelled"]
ENDED: Final = ("completed", "failed", "expired", "cancelled")


class BatchBegun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What does not change in a batch."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    input_bytes: int
    completion_window: str
    created_s: float
    expires_s: float
    metadata: dict[str, str] | None = None
    output_ttl_s: int


class BatchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch has failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What changes. Each entry holds the state after it; times are Unix seconds."""

    status: Status = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    model: str | None = None
    in_progress_s: float | None = None
    finalizing_s: float | None = None
    cancelling_s: float | None = None
    ended_s: float | None = None
    ending: Ending | None = None
    """The status that the files which are being made belong to."""
    making: list[str] = []
    """Ids of these files: a gateway that starts again deletes them first."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: list[BatchProblem] = []


class AnsweredLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of the output or of the errors."""

    index: int
    """Of the request's line in the input, from 0."""
    is_error: bool
    data: bytes
    """JSON with its newline."""


class BatchEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One entry of the log."""

    owner: GatewayId
    """The gateway that may append."""
    state: BatchState
    begun: BatchBegun | None = None
    """In the first entry, and in the last one of a batch that has ended."""
    lines: list[AnsweredLine] = []


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(BatchEntry)


def encode_entry(entry: BatchEntry) -> bytes:
    return _encoder.encode(entry)


def decode_entry(data: bytes) -> BatchEntry:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"an entry of a batch cannot be decoded: {error}") from error
