"""Define what the engine and a runner exchange: a plan for each step, its launch and its result.

A request keeps one row (0 .. max_num_seqs-1) from admission to its end or preemption. The runner
keeps per-row state (ids, block table, sampling state) and learns about changes only from here.
Decoding rows are named by number only, since each step has many of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.api.pooling import Pooled, PoolingParams
from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.grammar.matcher import Grammar
from tokenmesh.shared.config.draft_tree import num_computed
from tokenmesh.shared.tensor_blob import TensorBlob

MAX_MARKER_IDS: Final = 32
"""Tokens of a marker that begins or ends reasoning, see `ThinkingBudget`."""

MAX_OTHER_ENDS: Final = 4
"""Further markers that end it."""


@dataclass(slots=True)
class NewRow:
    """A request enters a row, for the first time or after preemption."""

    row: int
    token_ids: list[int]
    """All known tokens: the prompt and what was generated so far."""
    num_prompt: int
    """It says how many of `token_ids` are prompt; penalties and output positions count from
    here."""
    sampling: SamplingParams
    media: list[MediaItem]
    wants_prompt_logprobs: bool
    """True only until they were delivered once."""
    embeddings: dict[str, TensorBlob] = field(default_factory=dict)
    """content_hash -> the encoder's output [num_embeddings, width] for each item of `media`."""
    grammar: Grammar | None = None
    """It holds what `sampling.structured` was compiled to."""
    state: int | None = None
    """The slot of the saved state that the row begins with; None: with none."""
    pooling: PoolingParams | None = None
    """Set: the row draws nothing; its numbers are computed with the last token of its prompt."""
    type_ids: bytes = b""
    """See `PoolItem.type_ids`."""
    adapter: AdapterMatrices | None = None


class ScheduledRow(msgspec.Struct, gc=False):
    """It holds what one row does in this step: compute known tokens [start, start + num_tokens),
    and after them its `drafts`, as if they were known."""

    row: int
    start: int
    num_tokens: int
    new_blocks: list[int]
    """Block ids appended to the row's table in this step (after a prefix hit: all of them)."""
    samples: bool
    """True when the last known token is among those computed, so a next one is drawn."""
    new_windowed: list[list[int]] = []
    """Likewise for the table of each window group."""
    drafts: list[int] = []
    """Predicted tokens after the last known one; only where `samples`. Each is kept if the row
    draws the same token in its place; the first that differs ends them."""
    num_proposed: int = 0
    """It says how many tokens the runner's own drafter proposes after what the row draws; only
    where `samples`, and no more than `Runner.max_proposed`."""
    is_followed: bool = False
    """It tells whether the runner's own drafter reads these tokens, so that it can propose what
    follows them, now or in a later step."""
    pools: bool = False
    """True when the last token of a pooled prompt is among those computed."""
    fills: list[tuple[int, int]] = []
    """Blocks of the row's tables before `start`, each with the slot of the host tier that it is
    copied from before anything of the step is computed."""
    parents: list[int] = []
    """Where drafts branch: by draft the place of the one that it follows, -1 for the last known
    token. Then those are kept that follow each other and are what the row draws. Empty: each draft
    follows the one before it."""

    @property
    def num_computed(self) -> int:
        """Tokens that the row computes."""
        extra = num_computed(self.parents) if self.parents else len(self.drafts)
        return self.num_tokens + extra


@dataclass(slots=True, eq=False)
class SavedState:
    """The state of a row behind a full block."""

    slot: int
    row: int
    """Whose state it is, in the step that saves it."""
    hashes: list[bytes]
    """These are the hashes of all blocks before it. The last one is what it is found by."""

    @property
    def key(self) -> bytes:
        """The hash of the last block."""
        return self.hashes[-1]


class StepPlan(msgspec.Struct):
    """One engine iteration. Apply removed, then new, then grown; no row is in both of the others.
    At the end, copy the states of `saves`, one after the other, and the blocks of `host_saves`.

    A row number may be removed and given to another request in the same plan. After a step that
    failed, `removed_rows` may name rows that the runner never came to know.
    """

    step: int
    removed_rows: list[int] = []
    new_rows: list[NewRow] = []
    grown: list[tuple[int, int]] = []
    """Decoding rows, each with a block id to append to its table."""
    grown_windowed: list[tuple[int, list[int]]] = []
    """The same rows, each with a block id for each window group's table; empty without such."""
    decodes: list[int] = []
    """Rows that compute the token after those they have computed, and draw the next one.

    A step in flight may still draw that token: only the runner knows its id. The runner also counts
    the row's positions.
    """
    scheduled: list[ScheduledRow] = []
    """Rows that compute known tokens."""
    saves: list[SavedState] = []
    """These are the saves of these, whose states are copied where."""
    host_saves: list[tuple[int, int]] = []
    """Blocks, each with the slot of the host tier that it is copied to at the step's end."""

    @property
    def has_drafts(self) -> bool:
        """Return whether any row has drafts."""
        # most steps only decode: nothing is made to find that out
        return bool(self.scheduled) and any(entry.drafts for entry in self.scheduled)

    @property
    def rows(self) -> list[int]:
        """Rows that compute something, in the order in which they were scheduled."""
        return self.decodes + [entry.row for entry in self.scheduled]

    @property
    def num_rows(self) -> int:
        """Return how many compute something."""
        return len(self.decodes) + len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        if not self.scheduled:
            return len(self.decodes)
        return len(self.decodes) + sum(entry.num_computed for entry in self.scheduled)


def single_ids(tokens: Mapping[int, list[int]]) -> list[int] | None:
    """Return what rows drew, one token each; None where one of them drew several."""
    try:
        return [token for (token,) in tokens.values()]
    except ValueError:
        return None


class StepResult(msgspec.Struct):
    """The outcome of a plan."""

    tokens: dict[int, list[int]] = {}
    """row -> the ids that it drew, for each that decodes or has `samples` set and did not fail: one
    more than there were drafts before the first wrong one. They may go on past the stream's end."""
    drafts: dict[int, list[int]] = {}
    """row -> what the runner's drafter proposes after the last of `tokens`, at most `num_proposed`
    ids; shorter or left out where it does not know. They are used in the row's next step or not at
    all, so a wrong or missing one costs time and never changes a token."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """These are the log-probabilities of all drawn tokens, by row, where they were requested."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """row -> one entry for each prompt position computed in this step, in order.

    The entry for position p (p >= 1) describes prompt token p given the tokens before it; the
    chunk [start, start + n) yields the entries of positions start+1 .. start+n that are prompt.
    """
    alignments: dict[int, list[int]] = {}
    """row -> see `Delta.alignment`, in the step that computes the last of its prompt."""
    pooled: dict[int, Pooled] = {}
    """row -> its numbers, for each that `pools` and did not fail."""
    errors: dict[int, str] = {}
    """row -> why this request alone cannot go on (for example a media blob that expired)."""
    non_retryable: set[int] = set()
    """Those of `errors` whose own parameters are the reason: no other worker could go on."""
