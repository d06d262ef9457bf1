"""Request: what the engine knows about one stream, from its arrival to its end.

A request has known and computed tokens, and each step computes tokens until the second number
reaches the first. It has parts with one writer each: `spec` is frozen, `prepared` is written
before the request enters the engine, `place` by `Scheduler` and its `RowTable`, `kv` by
`BlockTables` and `PrefixCache`, `decode` by `DecodeWheel`, `output` by `Engine`.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from tokenmesh.engine.api.pooling import Pooled
from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.plan import SavedState
from tokenmesh.engine.request.repetition import ends_in_loop
from tokenmesh.engine.request.spec import Ending, PreparedParts, RequestSpec
from tokenmesh.engine.request.timeline import Timeline

NO_ROW: Final = -1


class Status(Enum):
    """Where a request is. A preempted request waits again."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class QueuePlace:
    """A request's place in the queue, and its row."""

    status: Status = Status.NEW
    arrival: int = 0
    """Order of arrival; set when the scheduler accepts the request, kept over preemptions."""
    row: int = NO_ROW
    lane: int = 0
    """Steps alternate between lanes; this one's compute its tokens while it has the row."""
    admitted_step: int = 0
    """The step that gave the row; what older steps drew there is not for this request."""
    num_expected: int = 0
    """Tokens that the prefix cache held when the request began to wait; 0 once it has a row."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at the first admission; None before it."""
    num_filled: int = 0
    """Those of `num_cached` that came from the host tier."""
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
    """It tells whether the keys are those of a sequence beyond the rope boundary."""
    num_matched: int = 0
    """Tokens at the beginning that the prefix cache has blocks of, where rows keep states."""
    route_hashes: list[bytes] = field(default_factory=list)
    """One for each full route block of known tokens, as far as they were needed."""
    pins: list[bytes] = field(default_factory=list)
    """Keys of images in the host tier that are kept until its prompt is computed."""
    num_routed: int = 0
    """Route blocks that were looked at since admission."""


class TurnCount:
    """Steps in which all requests of a decode wheel computed one token each."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


NO_TURNS: Final = TurnCount()
"""This is the count of requests that are not on a wheel."""


class DecodeState:
    """It says how many tokens of a request are computed; written by `DecodeWheel`."""

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
    """It holds what was delivered of a request's output."""

    num_resumed: int
    """Output tokens that earlier attempts delivered: the offset of the first token sent here."""
    wants_prompt_logprobs: bool
    """Until they are delivered."""
    has_reported: bool = False
    """It tells whether a delta of this attempt was sent."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: Pooled | None = None
    """The numbers of a request with `pooling`."""
    alignment: list[int] | None = None
    """See `Delta.alignment`; until it is delivered."""
    num_drafts: int = 0
    """Tokens that were drafted, in steps whose tokens it got; written by `Speculating`, as is
    `num_accepted`."""
    num_accepted: int = 0
    """It says how many of them it drew as well."""


class Request:
    """One stream. Written by the engine thread only, once it was submitted."""

    __slots__ = (
        "decode",
        "drafting",
        "key",
        "kv",
        "num_prompt",
        "output",
        "place",
        "prepared",
        "spec",
        "timeline",
        "token_ids",
    )

    def __init__(self, spec: RequestSpec, token_ids: list[int]) -> None:
        """token_ids: the prompt and what earlier attempts delivered; drawn tokens are appended."""
        self.spec: Final = spec
        self.prepared = PreparedParts()
        self.key = spec.key
        self.num_prompt = spec.num_prompt
        self.token_ids = token_ids
        self.place = QueuePlace()
        self.kv = KvState()
        self.decode = DecodeState()
        self.drafting: object = None
        """It holds what the proposer of drafts keeps of it; read and written by that alone."""
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
    def computes_all(self) -> bool:
        """True while it needs every position of its prompt computed: it may use no KV of others."""
        return self.output.wants_prompt_logprobs or self.spec.reads_all

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
        if self.prepared.refusal is not None:
            return Ending("error", error=self.prepared.refusal)
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
