"""What a message to a page of the console holds."""

import msgspec


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


class ProcessState(msgspec.Struct, frozen=True):
    id: str
    service: str
    version: str
    draining: bool
    late: bool
    """Whether a heartbeat is overdue."""
    queued: int
    models: list[str]
    load: WorkerState | None


class ModelState(msgspec.Struct, frozen=True):
    """A model that a page can chat with, or show."""

    name: str
    max_model_len: int
    generates: bool
    takes_images: bool
    tasks: list[str]
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
    """What only admins see."""

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
    """Whether the admin routes are on and the key may use them."""
    models: list[ModelState]
    requests: RunningRequests
    mesh: MeshState | None
