"""Messages to scheduler_svc: which worker takes a request, and that a model has to wake."""

import msgspec

from tokenmesh.shared.ids import ModelName, RequestId, WorkerId


class Place(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request a worker. Answered with Placed, Refused or Failed, after any number of Queued."""

    request_id: RequestId
    model: ModelName
    num_tokens: int
    """Tokens to prefill: the prompt and what an earlier attempt already produced."""
    max_tokens: int
    num_streams: int = 1
    """n: how many streams the worker will run for this request."""
    route_hashes: bytes = b""
    priority: int = 0
    """Smaller is sooner, as in vLLM."""
    attempt: int = 0
    exclude: list[WorkerId] = []
    """Workers that have failed, the last one to do so first: a wish, where there are others."""
    reservation: str = ""
    """The reservation of an earlier placement of the same streams: to be given back."""
    tenant: str = ""
    """Whose turn it takes while it waits."""
    weight: float = 1.0
    """The tenant's share of turns; its readers bound it."""
    tenant_priority: int = 0
    """The tenant's class, before `priority`; smaller is sooner."""
    has_grammar: bool = False
    """Its streams follow a grammar, which the worker must compile first."""
    lora: str | None = None
    """The adapter that the worker must serve."""
    lora_hash: str = ""
    """The content that it must have; empty: any."""


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Keep-alive while a request waits for room. Not final."""

    position: int


class KvOrigin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From which worker the KV of a prompt's blocks comes, instead of being computed."""

    worker_id: WorkerId
    epoch: int
    computes: bool = False
    """It is to compute the prompt; else it has some of it."""
    reservation: str = ""
    """The reservation on it, which it gives back when it has computed."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker as the decision saw it."""

    worker_id: WorkerId
    estimated_ttft_s: float
    running: int = 0
    kv_usage: float = 0.0
    matched_tokens: int = 0
    """Tokens of the prompt that are in the worker's prefix cache by the index."""
    reserved_tokens: int = 0
    """Uncached prompt tokens that others had reserved on it."""
    cost_s: float = 0.0
    """The cost that was compared: the estimate, and what it costs others that the prompt is
    computed there; 0: the estimate alone."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The decision and, for the trace, what it was made from."""

    worker_id: WorkerId
    epoch: int
    """The worker's incarnation; a Generate that reaches another one is refused."""
    queued_s: float = 0.0
    candidates: list[Candidate] = []
    reason: str = ""
    """Why this one: prefix, cost (another has more of the prompt), load (no worker has any of it),
    index away (judged by load alone), prefill elsewhere (another one computes it), kv elsewhere
    (another one has more of it, which this one reads)."""
    reservation: str = ""
    """Given back by the worker at the first token; empty: nothing is reserved."""
    kv: KvOrigin | None = None
    """To be handed on to the worker; None: it computes what it lacks."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """No room, by scheduler or worker: try again after `retry_after_s`, or elsewhere."""

    reason: str
    retry_after_s: float


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Wake a model on demand. Answered with Awake or Failed, after any number of Queued."""

    request_id: RequestId
    """The first request that needs it."""
    model: ModelName
    is_passed_on: bool = False
    """By a scheduler to the one that decides for the model's workers, which sends no Queued."""


class Awake(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A worker of the model is awake."""

    seconds: float = 0.0
    """Since the Wake."""
