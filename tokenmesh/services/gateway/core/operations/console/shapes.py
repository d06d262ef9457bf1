"""Define what a message to a page of the console holds.

TokenRates are those of the mesh, RequestProgress is how far a running request has come.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.mesh.session import SessionState
from tokenmesh.services.gateway.core.mesh.streams import Stream
from tokenmesh.shared.membership import Member
from tokenmesh.shared.messages.beat import WorkerLoad


class WorkerState(msgspec.Struct, frozen=True):
    """The load of a worker, from its last heartbeat."""

    running: int
    waiting: int
    max_num_seqs: int
    queued_tokens: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tokens_per_s: float
    step_s: float
    preemptions: int
    prefill_tokens: int
    decode_tokens: int
    cached_tokens: int
    sleep_level: int
    kv_leases: int
    """Prompts whose KV it keeps for other workers now."""


class ProcessState(msgspec.Struct, frozen=True):
    id: str
    service: str
    version: str
    draining: bool
    late: bool
    """It tells whether a heartbeat is overdue."""
    queued: int
    models: list[str]
    kv_role: str
    """It is both, prefill or decode; empty: the worker exchanges no KV."""
    kv_tiers: list[str]
    """Where its KV is besides the pool."""
    load: WorkerState | None


class ModelState(msgspec.Struct, frozen=True):
    """A model that a page can chat with, or show."""

    name: str
    max_model_len: int
    generates: bool
    takes_images: bool
    tasks: list[str]
    draft_method: str
    """Where its drafts come from; empty: it has none."""
    max_drafts: int
    """Most of a stream in a step."""
    parent: str | None = None
    """The model of an adapter."""


class RunningRequest(msgspec.Struct, frozen=True):
    id: str
    path: str
    """Empty for responses without a connection, and those of realtime sessions."""
    tenant: str
    model: str | None
    phase: str
    """preparing, placing, prefill or generating."""
    age_s: float
    workers: list[str]
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    """Most output tokens of all its choices; 0: not known yet."""


class RunningRequests(msgspec.Struct, frozen=True):
    total: int
    newest: list[RunningRequest]


class Health(msgspec.Struct, frozen=True):
    """Workers and rates of the mesh; requests, times and errors of this gateway in a minute."""

    workers: int
    workers_up: int
    """Those that are neither draining nor asleep."""
    streams: int
    waiting: int
    queued: int
    """Requests that wait in schedulers for a worker."""
    kv_used: float
    """Share of all blocks, 0 to 1."""
    tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    cached_tokens_per_s: float | None
    requests: int
    errors: int
    refused: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None


class MeshState(msgspec.Struct, frozen=True):
    """It holds what only admins see."""

    health: Health
    num_processes: int
    processes: list[ProcessState]
    other_protocols: list[str]
    """Ids of processes that are ignored because their protocol differs."""
    tenant_streams: dict[str, int]
    """Running and waiting streams of the tenants that have most of them."""
    num_spans: int
    """Spans that this gateway has received: the list of traces has changed when it grows."""


class ConsoleState(msgspec.Struct, frozen=True):
    gateway: str
    version: str
    tenant: str
    is_admin: bool
    can_manage: bool
    """It tells whether the admin routes are on and the key may use them."""
    models: list[ModelState]
    requests: RunningRequests
    mesh: MeshState | None


_WINDOW_S: Final = 5.0
_LEAST_S: Final = 0.2
"""A shorter time between two samples gives no rate: heartbeats come every 250 ms."""

Counts = tuple[int, int, int]
"""Decoded, computed and cached prompt tokens."""


class TokenRates:
    """Adds what each worker has counted between two samples, so that restarts do not matter."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Counts] = {}
        self._totals: Counts = (0, 0, 0)
        self._samples: deque[tuple[float, Counts]] = deque()

    async def sample(self, workers: Iterable[Member], now: float) -> None:
        """Take in the last heartbeats. A worker that is new only sets its starting point."""
        turns = Turns()
        current: dict[tuple[str, int], Counts] = {}
        for member in workers:
            await turns.rest()
            if member.beat.load is None:
                continue
            key = (member.beat.instance_id, member.beat.epoch)
            current[key] = counts = _counts(member.beat.load)
            before = self._last.get(key, counts)
            self._totals = (
                self._totals[0] + max(0, counts[0] - before[0]),
                self._totals[1] + max(0, counts[1] - before[1]),
                self._totals[2] + max(0, counts[2] - before[2]),
            )
        self._last = current
        self._samples.append((now, self._totals))
        while now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()

    def per_second(self) -> tuple[float, float, float] | None:
        """Decoded, computed and cached prompt tokens per second; None before the second sample."""
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        seconds = last_s - first_s
        if seconds < _LEAST_S:
            return None
        decoded, computed, cached = (
            round((b - a) / seconds, 1) for a, b in zip(first, last, strict=True)
        )
        return decoded, computed, cached


def _counts(load: WorkerLoad) -> Counts:
    return load.decode_tokens, load.prefill_tokens, load.cached_tokens


_MAX_WORKERS: Final = 16
"""It bounds the workers of one request, in its line."""


@dataclass(slots=True)
class RequestProgress:
    """The streams of one request together."""

    stream: Stream
    """One of them."""
    output_tokens: int = 0
    max_tokens: int = 0
    prompts: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt, by its first choice."""
    workers: dict[str, None] = field(default_factory=dict)
    num_placing: int = 0
    num_streams: int = 0

    def add(self, stream: Stream) -> None:
        session = stream.session
        self.num_streams += 1
        self.output_tokens += len(session.token_ids)
        self.max_tokens += stream.prompt.max_tokens
        self.prompts[stream.job.first_choice] = stream.prompt.num_tokens
        if session.state is SessionState.PLACING:
            self.num_placing += 1
        elif session.worker_id is not None and len(self.workers) < _MAX_WORKERS:
            self.workers[session.worker_id] = None

    @property
    def phase(self) -> str:
        if self.output_tokens:
            return "generating"
        return "placing" if self.num_placing == self.num_streams else "prefill"


def connected_row(
    context: RequestContext, progress: RequestProgress | None, now: float
) -> RunningRequest:
    """A request with a client that waits; `progress` is None before it has a stream."""
    return RunningRequest(
        id=context.request_id,
        path=context.path,
        tenant=context.access.tenant.name,
        model=context.model,
        phase="preparing" if progress is None else progress.phase,
        age_s=round(now - context.started_s, 1),
        workers=[] if progress is None else list(progress.workers),
        prompt_tokens=0 if progress is None else sum(progress.prompts.values()),
        output_tokens=0 if progress is None else progress.output_tokens,
        max_tokens=0 if progress is None else progress.max_tokens,
    )


def unconnected_row(progress: RequestProgress) -> RunningRequest:
    """A background response, or a response of a realtime session."""
    job = progress.stream.job
    return RunningRequest(
        id=job.request_id,
        path="",
        tenant=job.tenant.name,
        model=job.card.requested_name,
        phase=progress.phase,
        age_s=0.0,
        workers=list(progress.workers),
        prompt_tokens=sum(progress.prompts.values()),
        output_tokens=progress.output_tokens,
        max_tokens=progress.max_tokens,
    )
