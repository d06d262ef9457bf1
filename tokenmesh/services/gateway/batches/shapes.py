"""Shapes of the Batch API."""

import msgspec

from tokenmesh.services.gateway.batches.records import BatchBegun, BatchProblem, BatchState


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
