"""Request: what the engine knows about one stream, from its arrival to its end.

A request has known and computed tokens, and each step computes tokens until the second number
reaches the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from tokenmesh.services.worker_svc.engine.clock import STILL, StepClock
from tokenmesh.services.worker_svc.engine.saved_states import SavedState
from tokenmesh.services.worker_svc.engine.timeline import Timeline
from tokenmesh.services.worker_svc.grammar.matcher import Grammar
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.failed import Failed
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import RepetitionRule, SamplingParams
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs
from tokenmesh.shared.tensor_blob import TensorBlob


class TenantShare(NamedTuple):
    """A tenant, as the gateway knows it."""

    tenant: str = ""
    weight: float = 1.0
    """Its share, beside the weights of the others that are here."""
    group: int = 0
    """Its class: while it wants anything, those of greater ones take nothing new."""


NO_TENANT: Final = TenantShare()


def ends_in_loop(token_ids: Sequence[int], start: int, rule: RepetitionRule) -> bool:
    """Whether the tokens from `start` on end with one pattern, `min_count` times in a row.

    Depends on the tokens alone, so it is the same on every worker that goes on with them.
    """
    length = len(token_ids)
    longest = min(rule.max_size, (length - start) // rule.min_count)
    last = token_ids[-1]
    for size in range(rule.min_size, longest + 1):
        # nearly every pattern is ruled out by one token
        if token_ids[-1 - size] == last and _repeats(token_ids, size, rule.min_count):
            return True
    return False


def _repeats(token_ids: Sequence[int], size: int, count: int) -> bool:
    end = len(token_ids)
    pattern = token_ids[end - size :]
    return all(token_ids[end - (k + 1) * size : end - k * size] == pattern for k in range(1, count))


NO_ROW: Final = -1


class StreamKey(NamedTuple):
    """One attempt of one stream of one gateway process."""

    gateway: GatewayId
    stream: int
    attempt: int


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


@dataclass(slots=True, eq=False)
class Request:
    """One stream. Written by the engine thread only, once it was handed over.

    Positions count from the first prompt token; `min_len` and `max_len` are totals as well.
    """

    key: StreamKey
    request_id: RequestId
    token_ids: list[int]
    """Everything known: the prompt, what earlier attempts delivered, what was drawn here."""
    num_prompt: int
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    media: list[MediaItem] = field(default_factory=list)
    embeddings: dict[str, TensorBlob] = field(default_factory=dict)
    owner: TenantShare = NO_TENANT
    priority: int = 0
    """Among its owner's own."""
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
    traceparent: str | None = None
    grammar: Grammar | None = None
    refusal: Failed | None = None
    """Why it cannot be served after all, found out after it was accepted."""

    num_resumed: int = field(init=False)
    """Output tokens that earlier attempts delivered: the offset of the first token sent here."""
    min_len: int = field(init=False)
    max_len: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)

    is_long: bool = field(default=False, init=False)
    """Whether its KV is that of a sequence beyond the boundary."""
    status: Status = Status.NEW
    arrival: int = 0
    """Order of arrival; set when the scheduler takes the request, kept over preemptions."""
    row: int = NO_ROW
    admitted_step: int = 0
    """The step that gave the row; what older ones drew there is not for this request."""
    clock: StepClock = STILL
    """Its ticks count as computed tokens."""
    due: int = -1
    """The tick at which it reaches a border, while it decodes; see `Decoding`."""
    num_expected: int = 0
    """Tokens that the prefix cache held when the request joined the line; 0 once it has a row."""
    is_prefilling: bool = True
    """True until the last known token was computed since admission."""
    blocks: list[int] = field(default_factory=list)
    windowed: list[list[int]] = field(default_factory=list)
    """For each window group its table, see `KvGroups`; the null block for what is behind."""
    num_behind: int = 0
    """Leading null blocks of each of `windowed`."""
    num_planned: int = 0
    """Entries of each of `windowed` that the runner knows."""
    capacity: int = 0
    """Tokens that `blocks` hold."""
    hashes: list[bytes] = field(default_factory=list)
    """One for each full block of known tokens, as far as they were needed."""
    route_hashes: list[bytes] = field(default_factory=list)
    """One for each full route block of known tokens, as far as they were needed."""
    num_routed: int = 0
    """Route blocks that were looked at since admission."""
    num_matched: int = 0
    """Tokens at its beginning that the prefix cache has blocks of, where rows keep states."""
    began_with: SavedState | None = None
    """The saved state that its row began with."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None before it."""
    has_reported: bool = False
    """Whether a delta of this attempt went out."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_preemptions: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    _computed: int = 0
    """What `num_computed` is beyond the clock."""

    def __post_init__(self) -> None:
        self.num_resumed = len(self.token_ids) - self.num_prompt
        self.min_len = self.num_prompt + self.sampling.min_tokens
        self.max_len = self.num_prompt + self.sampling.max_tokens
        stops = frozenset(self.sampling.stop_token_ids)
        self.stop_ids = stops if self.sampling.ignores_eos else stops | self.eos_ids
        # an earlier attempt that delivered tokens delivered these before them
        self.wants_prompt_logprobs = (
            self.sampling.prompt_logprobs is not None and self.num_resumed == 0
        )

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: smaller priority, then earlier arrival."""
        return (self.priority, self.arrival)

    @property
    def block_salt(self) -> str | None:
        """The salt of its blocks: those of the two sides of the boundary are never shared."""
        if self.rope_boundary is None or (self.cache_salt is None and not self.is_long):
            return self.cache_salt
        return f"{'long' if self.is_long else 'short'}: {self.cache_salt or ''}"

    @property
    def decode_end(self) -> int:
        """The first length that it cannot compute from the KV it has."""
        if self.rope_boundary is None or self.is_long:
            return self.max_len
        return min(self.max_len, self.rope_boundary + 1)

    @property
    def num_known(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens that are computed or scheduled to be. A decoding request has one less than it
        knows, or as many while its next token is being drawn."""
        return self._computed + self.clock.now

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._computed = value - self.clock.now

    @property
    def backlog(self) -> int:
        """Tokens to compute before the next one can be drawn; 0 for a decoding request.

        While it waits for a row, as far as one can tell: what is cached may go until then.
        """
        done = max(self.num_computed, self.num_expected)
        return len(self.token_ids) - done if self.is_prefilling else 0

    def choose_side(self) -> None:
        """Before any of its KV is found or computed: its length decides the side."""
        is_long = self.rope_boundary is not None and self.num_known > self.rope_boundary
        if is_long != self.is_long:
            self.is_long = is_long
            # a new list, because the block log still refers to the old one
            self.hashes = []

    def ending(self) -> Ending | None:
        """Whether the last known token, or a refusal, ends the stream. None while it goes on."""
        if self.refusal is not None:
            return Ending("error", error=self.refusal)
        length = len(self.token_ids)
        if length == self.num_prompt:
            return None
        token = self.token_ids[-1]
        if length >= self.min_len and token in self.stop_ids:
            is_eos = token in self.eos_ids and not self.sampling.ignores_eos
            return Ending("stop", stop_token=None if is_eos else token)
        if length >= self.max_len:
            return Ending("length")
        rule = self.sampling.repetition
        is_loop = (
            rule is not None
            and length >= self.min_len
            and ends_in_loop(self.token_ids, self.num_prompt, rule)
        )
        return Ending("repetition") if is_loop else None
