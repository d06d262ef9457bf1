"""Define what was requested of one stream, and how a stream ends."""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.api.pooling import PoolingParams
from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.api.tokens import FinishReason
from tokenmesh.engine.grammar.matcher import Grammar
from tokenmesh.shared.failed import Failed
from tokenmesh.shared.hashing import Adapter, EmbedsKeys
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.tensor_blob import TensorBlob


class TenantShare(NamedTuple):
    """A request's tenant. Rows, blocks and prefill are shared among tenants by weight."""

    tenant: str = ""
    weight: float = 1.0
    """Its share, relative to the weights of the other tenants present."""
    group: int = 0
    """Its class: while it wants anything, tenants of greater classes receive nothing new."""


NO_TENANT: Final = TenantShare()


class StreamKey(NamedTuple):
    """One attempt of one stream of one gateway process; of a Pool, one of its items."""

    gateway: GatewayId
    stream: int
    attempt: int
    item: int = 0


@dataclass(slots=True, frozen=True)
class Ending:
    """Why a stream ended."""

    reason: FinishReason
    stop_token: int | None = None
    """The id of `stop_token_ids` that ended it; None for an end-of-sequence token."""
    error: Failed | None = None


@dataclass(slots=True, frozen=True, eq=False)
class RequestSpec:
    """It holds what was requested. Positions count from the first prompt token."""

    key: StreamKey
    request_id: RequestId
    num_prompt: int
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    media: list[MediaItem] = field(default_factory=list)
    whole_runs: tuple[tuple[int, int], ...] = ()  # see MediaFacts.whole_runs
    owner: TenantShare = NO_TENANT
    priority: int = 0
    """Among its tenant's requests."""
    cache_salt: str | None = None
    rope_boundary: int | None = None
    """All keys of a sequence longer than this differ from those of shorter ones, so KV is computed
    again where the request outgrows it; None: the model has no such length."""
    route_head: bytes = b""
    """It holds what the chain of route hashes begins with; empty: the request is not in the
    index."""
    route_salt: str | None = None
    """The salt as the tokenizer hashed it."""
    reservation: str = ""
    """It holds what its placement reserved on this worker."""
    lora: Adapter | None = None
    traceparent: str | None = None
    pooling: PoolingParams | None = None
    """Set: nothing is drawn; the request ends when its prompt is computed."""
    type_ids: bytes = b""
    """See `PoolItem.type_ids`."""
    is_whole: bool = False
    """Its tokens depend on later ones: the prompt is computed in one step, and nothing is kept."""
    computes_only: bool = False
    """Nothing is drawn or sent: the request ends when its tokens are computed."""
    reads_all: bool = False
    """Its answer needs the state of every token: nothing that is cached is skipped."""
    prediction: list[int] = field(default_factory=list)
    """It holds what the output may be close to; drafts come from it where the model takes any."""
    min_len: int = field(init=False)
    """Prompt and output tokens."""
    max_len: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    has_block_extras: bool = field(init=False)
    """It tells whether hashes of blocks cover more than their tokens, on either side of the
    boundary."""

    def __post_init__(self) -> None:
        stops = frozenset(self.sampling.stop_token_ids)
        ids = stops if self.sampling.ignores_eos else stops | self.eos_ids
        object.__setattr__(self, "min_len", self.num_prompt + self.sampling.min_tokens)
        object.__setattr__(self, "max_len", self.num_prompt + self.sampling.max_tokens)
        object.__setattr__(self, "stop_ids", ids)
        has_extras = bool(self.media or self.lora is not None or self.cache_salt is not None)
        object.__setattr__(self, "has_block_extras", has_extras)


@dataclass(slots=True, eq=False)
class PreparedParts:
    """It holds what a request waits for before it enters the engine, which only reads it."""

    embeddings: dict[str, TensorBlob] = field(default_factory=dict)
    """By content hash."""
    embeds_keys: EmbedsKeys = field(default_factory=dict)
    """These are the keys of media that are embeddings of a client, for the hashes of blocks."""
    grammar: Grammar | None = None
    adapter: AdapterMatrices | None = None
    remote_from: int | None = None
    """Its tokens from there on were computed for it by another worker; None: it did not ask one."""
    refusal: Failed | None = None
    """Why it cannot be served after all, found out after it was accepted."""
