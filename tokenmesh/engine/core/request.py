"""Request: what the engine knows about one stream, from its arrival to its end.

A request has known and computed tokens, and each step computes tokens until the second number
reaches the first. It has parts with one writer each: `spec` is frozen, `place` is
written by `Scheduler` and its `RowTable`, `kv` by `BlockTables` and `PrefixCache`, `decode` by
`DecodeWheel`, `output` by `Engine`.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.core.repetition import ends_in_loop
from tokenmesh.engine.core.timeline import Timeline
from tokenmesh.engine.grammar.matcher import Grammar
from tokenmesh.engine.kv.saved_states import SavedState
from tokenmesh.shared.hashing import Adapter, EmbedsKeys
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.failed import Failed
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.pooling import Pooled, PoolingParams
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs
from tokenmesh.shared.tensor_blob import TensorBlob

NO_ROW: Final = -1


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


class Status(Enum):
    """Where a request is. A preempted request waits again."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, frozen=True)
class Ending:
    """Why a stream ended."""

    reason: FinishReason
    stop_token: int | None = None
    """The id of `stop_token_ids` that ended it; None for an end-of-sequence token."""
    error: Failed | None = None


@dataclass(slots=True, frozen=True, eq=False)
class RequestSpec:
    """What was requested. Positions count from the first prompt token."""

    key: StreamKey
    request_id: RequestId
    num_prompt: int
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    media: list[MediaItem] = field(default_factory=list)
    embeddings: dict[str, TensorBlob] = field(default_factory=dict)
    embeds_keys: EmbedsKeys = field(default_factory=dict)
    """Of media that are embeddings of a client, for the hashes of blocks."""
    whole_runs: tuple[tuple[int, int], ...] = ()  # see MediaFacts.whole_runs
    owner: TenantShare = NO_TENANT
    priority: int = 0
    """Among its tenant's requests."""
    cache_salt: str | None = None
    rope_boundary: int | None = None
    """All keys of a sequence longer than this differ from those of shorter ones, so KV is computed
    again where the request outgrows it; None: the model has no such length."""
    route_head: bytes = b""
    """What the chain of route hashes begins with; empty: the request is not in the index."""
    route_salt: str | None = None
    """The salt as the tokenizer hashed it."""
    reservation: str = ""
    """What its placement reserved on this worker."""
    lora: Adapter | None = None
    adapter: AdapterMatrices | None = None
    traceparent: str | None = None
    grammar: Grammar | None = None
    pooling: PoolingParams | None = None
    """Set: nothing is drawn; the request ends when its prompt is computed."""
    type_ids: bytes = b""
    """See `PoolItem.type_ids`."""
    is_whole: bool = False
    """Its tokens depend on later ones: the prompt is computed in one step, and nothing is kept."""
    reads_all: bool = False
    """Its answer needs the state of every token: nothing that is cached is skipped."""
    refusal: Failed | None = None
    """Why it cannot be served after all, found out after it was accepted."""
    min_len: int = field(init=False)
    """Prompt and output tokens."""
    max_len: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    has_block_extras: bool = field(init=False)
    """Whether hashes of blocks cover more than their tokens, on either side of the boundary."""

    def __post_init__(self) -> None:
        stops = frozenset(self.sampling.stop_token_ids)
        ids = stops if self.sampling.ignores_eos else stops | self.eos_ids
        object.__setattr__(self, "min_len", self.num_prompt + self.sampling.min_tokens)
        object.__setattr__(self, "max_len", self.num_prompt + self.sampling.max_tokens)
        object.__setattr__(self, "stop_ids", ids)
        has_extras = bool(self.media or self.lora is not None or self.cache_salt is not None)
        object.__setattr__(self, "has_block_extras", has_extras)


@dataclass(slots=True, eq=False)
class QueuePlace:
    """A request's place in the queue, and its row."""

    status: Status = Status.NEW
    arrival: int = 0
    """Order of arrival; set when the scheduler accepts the request, kept over preemptions."""
    row: int = NO_ROW
    admitted_step: int = 0
    """The step that gave the row; what older steps drew there is not for this request."""
    num_expected: int = 0
    """Tokens that the prefix cache held when the request began to wait; 0 once it has a row."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None before it."""
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class KvState:
    """The blocks that a request holds, and the hashes of their contents."""

    blocks: list[int] = field(default_factory=list)
    windowed: list[list[int]] = field(default_factory=list)
    """For each window group its table, see `KvGroups`; the null block for what is behind."""
    num_behind: int = 0
    """Leading null blocks of each of `windowed`."""
    num_planned: int = 0
    """Entries of each of `windowed` that the runner knows."""
    capacity: int = 0
    """Tokens that `blocks` hold."""
    began_with: SavedState | None = None
    """The saved state that the row began with."""
    hashes: list[bytes] = field(default_factory=list)
    """One for each full block of known tokens, as far as they were needed."""
    is_long: bool = False
    """Whether the keys are those of a sequence beyond the rope boundary."""
    num_matched: int = 0
    """Tokens at the beginning that the prefix cache has blocks of, where rows keep states."""
    route_hashes: list[bytes] = field(default_factory=list)
    """One for each full route block of known tokens, as far as they were needed."""
    num_routed: int = 0
    """Route blocks that were looked at since admission."""


class TurnCount:
    """Steps in which all requests of a decode wheel computed one token each."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


NO_TURNS: Final = TurnCount()
"""Of requests that are not on a wheel."""


class DecodeState:
    """How many tokens of a request are computed; written by `DecodeWheel`."""

    __slots__ = ("base", "due", "is_prefilling", "turns")

    def __init__(self) -> None:
        self.turns = NO_TURNS
        """Each turn counts as a computed token."""
        self.base = 0
        """Computed tokens without the turns."""
        self.due = -1
        """The turn at which the request needs attention; -1: at none."""
        self.is_prefilling = True
        """True until the last known token was computed since admission."""


@dataclass(slots=True, eq=False)
class OutputState:
    """What was delivered of a request's output."""

    num_resumed: int
    """Output tokens that earlier attempts delivered: the offset of the first token sent here."""
    wants_prompt_logprobs: bool
    """Until they are delivered."""
    has_reported: bool = False
    """Whether a delta of this attempt was sent."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: Pooled | None = None
    """The numbers of a request with `pooling`."""
    alignment: list[int] | None = None
    """See `Delta.alignment`; until it is delivered."""


class Request:
    """One stream. Written by the engine thread only, once it was submitted."""

    __slots__ = ("decode", "key", "kv", "num_prompt", "output", "place", "spec", "timeline",
                 "token_ids")  # fmt: skip

    def __init__(self, spec: RequestSpec, token_ids: list[int]) -> None:
        """token_ids: the prompt and what earlier attempts delivered; drawn tokens are appended."""
        self.spec = spec
        self.key = spec.key
        self.num_prompt = spec.num_prompt
        self.token_ids = token_ids
        self.place = QueuePlace()
        self.kv = KvState()
        self.decode = DecodeState()
        num_resumed = len(token_ids) - spec.num_prompt
        # an earlier attempt that delivered tokens delivered prompt logprobs before them
        wants = spec.sampling.prompt_logprobs is not None and num_resumed == 0
        self.output = OutputState(num_resumed, wants)
        self.timeline = Timeline()

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests: smaller priority first, then earlier arrival."""
        return (self.spec.priority, self.place.arrival)

    @property
    def block_salt(self) -> str | None:
        """The salt of its blocks: those of the two sides of the boundary are never shared."""
        salt = self.spec.cache_salt
        if self.spec.rope_boundary is None or (salt is None and not self.kv.is_long):
            return salt
        return f"{'long' if self.kv.is_long else 'short'}: {salt or ''}"

    @property
    def decode_end(self) -> int:
        """The first length that it cannot compute from the KV it has."""
        boundary = self.spec.rope_boundary
        if boundary is None or self.kv.is_long:
            return self.spec.max_len
        return min(self.spec.max_len, boundary + 1)

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens that are computed or scheduled to be. A decoding request has one less than it
        knows, or as many while its next token is being drawn."""
        return self.decode.base + self.decode.turns.count

    @property
    def backlog(self) -> int:
        """Tokens to compute before the next one can be drawn; 0 for a decoding request.

        An estimate while it waits for a row: cached blocks may be evicted before.
        """
        done = max(self.num_computed, self.place.num_expected)
        return len(self.token_ids) - done if self.decode.is_prefilling else 0

    def ending(self) -> Ending | None:
        """Why the last known token, or a refusal, ends the stream; None while it continues."""
        spec = self.spec
        if spec.refusal is not None:
            return Ending("error", error=spec.refusal)
        length = len(self.token_ids)
        if length == self.num_prompt:
            return None
        token = self.token_ids[-1]
        if length >= spec.min_len and token in spec.stop_ids:
            is_eos = token in spec.eos_ids and not spec.sampling.ignores_eos
            return Ending("stop", stop_token=None if is_eos else token)
        if length >= spec.max_len:
            return Ending("length")
        rule = spec.sampling.repetition
        if rule is None or length < spec.min_len:
            return None
        return Ending("repetition") if ends_in_loop(self.token_ids, self.num_prompt, rule) else None
