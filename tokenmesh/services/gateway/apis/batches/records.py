"""Entries of a batch's log, and the objects of the Batch API that clients see of them.

Any gateway may read what another has written: a new field has a default, and no field is renamed or
retyped.
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
    """It holds what does not change in a batch."""

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
    """It holds what changes. Each entry holds the state after it; times are Unix seconds."""

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
    """This is the index of the request's line in the input, from 0."""
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


class BatchErrors(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[BatchProblem]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchInputDetails(msgspec.Struct):
    cached_tokens: int


class BatchOutputDetails(msgspec.Struct):
    reasoning_tokens: int


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all answers so far."""

    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of a tenant's batches."""

    object: str = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batch_object(begun: BatchBegun, state: BatchState) -> BatchObject:
    def ended_at(status: str) -> int | None:
        return _seconds(state.ended_s) if state.status == status else None

    usage = BatchUsage(
        input_tokens=state.input_tokens,
        input_tokens_details=BatchInputDetails(state.cached_tokens),
        output_tokens=state.output_tokens,
        output_tokens_details=BatchOutputDetails(state.reasoning_tokens),
        total_tokens=state.input_tokens + state.output_tokens,
    )
    return BatchObject(
        id=begun.id,
        endpoint=begun.endpoint,
        model=state.model,
        errors=BatchErrors(data=state.problems) if state.problems else None,
        input_file_id=begun.input_file_id,
        completion_window=begun.completion_window,
        status=state.status,
        output_file_id=state.output_file_id,
        error_file_id=state.error_file_id,
        created_at=int(begun.created_s),
        in_progress_at=_seconds(state.in_progress_s),
        expires_at=int(begun.expires_s),
        finalizing_at=_seconds(state.finalizing_s),
        completed_at=ended_at("completed"),
        failed_at=ended_at("failed"),
        expired_at=ended_at("expired"),
        cancelling_at=_seconds(state.cancelling_s),
        cancelled_at=ended_at("cancelled"),
        request_counts=RequestCounts(
            total=state.total, completed=state.completed, failed=state.failed
        ),
        usage=usage,
        metadata=begun.metadata,
    )


def _seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)
