"""Define what the engine emits after a step: deltas by gateway, ended streams, timelines and its
load.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from tokenmesh.engine.api.tokens import Delta, TokenLogprobs
from tokenmesh.engine.core.rate_meter import RateMeter
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.core.speculating import DraftTotals
from tokenmesh.engine.core.step_log import TimelineStep
from tokenmesh.engine.kv.block_log import BlockChange
from tokenmesh.engine.kv.host_tier import HostStats
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.kv.route_ledger import RouteChange
from tokenmesh.engine.plan import StepResult
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.failed import Failed, to_failed
from tokenmesh.shared.ids import GatewayId
from tokenmesh.shared.tokens import count_ids, pack_id, pack_ids


@dataclass(slots=True)
class EngineTotals:
    """Counts since the engine started."""

    added: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class EngineStats(msgspec.Struct, frozen=True, gc=False):
    """It says how busy the engine is."""

    num_added: int = 0
    """Requests that the engine has taken from its inbox so far."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_blocks_used: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    num_preemptions: int = 0
    """Since the engine started, as the two below."""
    prefill_tokens: int = 0
    """Computed in prefill chunks."""
    decode_tokens: int = 0
    """Computed by streams that decode, refused drafts included."""
    tenant_levels: Mapping[str, float] = {}
    """Recent use by tenant, divided by weight."""
    drafts: DraftTotals = DraftTotals()
    draft_bytes: int = 0
    """Memory of what drafts are looked up in."""
    host: HostStats | None = None
    """The numbers of the host tier; None without one."""


_NOTHING_YET: Final = EngineStats()


def stats_of(
    scheduler: Scheduler, cache: PrefixCache, rates: RateMeter, totals: EngineTotals
) -> EngineStats:
    running, waiting = scheduler.counts
    return EngineStats(
        num_added=totals.added,
        running=running,
        waiting=waiting,
        queued_tokens=scheduler.live.num_queued_tokens,
        kv_blocks_used=cache.pool.num_used,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        step_s=rates.step_s,
        num_preemptions=totals.preemptions,
        prefill_tokens=totals.prefill_tokens,
        decode_tokens=totals.decode_tokens,
        tenant_levels=scheduler.live.recent.levels,
        drafts=scheduler.speculating.totals,
        draft_bytes=scheduler.speculating.num_bytes,
        host=None if cache.host is None else cache.host.stats,
    )


@dataclass(frozen=True, slots=True)
class EndedStream:
    """A stream that is over. The engine no longer touches the request."""

    request: Request
    ending: Ending
    steps: list[TimelineStep]
    """Decode steps for its trace; empty when it is not traced."""


class StepOutput(msgspec.Struct):
    """Everything that leaves the engine at one time."""

    step: int
    deltas: dict[GatewayId, list[Delta]] = msgspec.field(default_factory=lambda: defaultdict(list))
    ended: list[EndedStream] = []
    stats: EngineStats = _NOTHING_YET
    duration_s: float = 0.0
    """This is the time of the step; 0 when there was none."""
    num_tokens: int = 0
    """Computed in the step."""
    routes: RouteChange | None = None
    """It holds what is new for the prefix index."""
    blocks: list[BlockChange] = []
    """It holds what is new in the prefix cache, where that is logged."""
    prefilling: dict[str, int] = {}
    """By reservation: tokens still to compute of a prompt that the step computed a part of."""


def add_token_deltas(
    deltas: dict[GatewayId, list[Delta]], owners: list[Request], ids: list[int]
) -> None:
    """A delta of one token, and nothing else, for each request."""
    for request, token in zip(owners, ids, strict=True):
        gateway, stream, attempt, _ = request.key
        offset = len(request.token_ids) - 1 - request.num_prompt
        deltas[gateway].append(Delta(stream, attempt, offset, pack_id(token)))


def each_draw(
    result: StepResult, owners: list[Request | None]
) -> Iterable[tuple[int, Request | None, bytes]]:
    """Row, owner and packed tokens of each draw; see `Drawn`."""
    return zip(result.tokens, owners, map(pack_ids, result.tokens.values()), strict=True)


def token_delta(
    request: Request, packed: bytes, logprobs: list[TokenLogprobs] | None, ending: Ending | None
) -> Delta:
    """The delta of the tokens that were just appended, with all that goes along; logprobs may go on
    past them."""
    count = count_ids(packed)
    offset = len(request.token_ids) - count - request.num_prompt
    return _full_delta(request, offset, packed, ending, logprobs and logprobs[:count])


def closing_delta(request: Request, ending: Ending) -> Delta:
    """The delta that ends a stream without a further token."""
    offset = len(request.token_ids) - request.num_prompt
    return _full_delta(request, offset, b"", ending, None)


def _full_delta(
    request: Request,
    offset: int,
    packed: bytes,
    ending: Ending | None,
    logprobs: list[TokenLogprobs] | None,
) -> Delta:
    is_first = not request.output.has_reported
    request.output.has_reported = True
    alignment, request.output.alignment = request.output.alignment, None
    return Delta(
        stream=request.key.stream,
        attempt=request.key.attempt,
        offset=offset,
        token_ids=packed,
        finish=ending.reason if ending else None,
        stop_token=ending.stop_token if ending else None,
        logprobs=logprobs,
        cached_tokens=_cached_tokens(request) if is_first else None,
        prompt_logprobs=_take_prompt_logprobs(request),
        error=ending.error if ending else None,
        alignment=alignment,
        drafts=_drafts_of(request),
    )


def _cached_tokens(request: Request) -> int:
    """Prompt tokens that no worker has computed for this request."""
    cached, remote_from = request.place.num_cached or 0, request.prepared.remote_from
    return cached if remote_from is None else min(cached, remote_from)


def _drafts_of(request: Request) -> tuple[int, int] | None:
    output = request.output
    return (output.num_drafts, output.num_accepted) if output.num_drafts else None


def _take_prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    """Once, when the whole prompt was computed: one entry a prompt token, None for the first."""
    is_whole = len(request.output.prompt_logprobs) == request.num_prompt - 1
    if not request.output.wants_prompt_logprobs or not is_whole:
        return None
    request.output.wants_prompt_logprobs = False
    entries: list[TokenLogprobs | None] = [None, *request.output.prompt_logprobs]
    request.output.prompt_logprobs = []
    return entries


def failure_of(reason: str, *, is_retryable: bool) -> Failed:
    """The error of a failed row; retried on another worker unless it is not retryable."""
    if is_retryable:
        return Failed(code="internal_error", message=reason, retryable=True)
    return to_failed(InvalidInput(reason))
