"""StepPlan and StepResult: all that scheduler and runner say to each other.

A request keeps one row (0 .. max_num_seqs-1) from admission to its end or preemption. The runner
keeps per-row state (ids, block table, sampling state) and learns about changes only from here.
Rows that decode are named by number and no more, since there are many of them in every step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tokenmesh.services.worker_svc.engine.saved_states import SavedState
from tokenmesh.services.worker_svc.grammar.matcher import Grammar
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tensor_blob import TensorBlob


@dataclass(slots=True)
class NewRow:
    """A request enters a row, for the first time or after preemption."""

    row: int
    token_ids: list[int]
    """All known tokens: the prompt and what was generated so far."""
    num_prompt: int
    """How many of `token_ids` are prompt; penalties and output positions count from here."""
    sampling: SamplingParams
    media: list[MediaItem]
    wants_prompt_logprobs: bool
    """True only until they were delivered once."""
    embeddings: dict[str, TensorBlob] = field(default_factory=dict)
    """content_hash -> the encoder's output [length, hidden] for each item of `media`."""
    grammar: Grammar | None = None
    """What `sampling.structured` was compiled to."""
    state: int | None = None
    """The slot of the saved state that the row begins with; None: with none."""


class ScheduledRow(msgspec.Struct, gc=False):
    """What one row does in this step: compute known tokens [start, start + num_tokens), and after
    them its `drafts`, as if they were known."""

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
    """Guesses of the tokens after the last known one; only where `samples`. Each is kept if it is
    the very token that the row draws in its place, and the first that is not ends them."""


class StepPlan(msgspec.Struct):
    """One engine iteration. Apply removed, then new, then grown; no row is in both of the others.
    At the end, copy the states of `saves`, one after the other.

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

    That token may be one that the row draws in a step still in flight: nobody but the runner knows
    its id. Where it stands is not said: the runner has counted along.
    """
    scheduled: list[ScheduledRow] = []
    """Rows that compute known tokens."""
    saves: list[SavedState] = []
    """Of these, whose states are copied where."""

    @property
    def rows(self) -> list[int]:
        """Whoever computes something, in the order in which it was scheduled."""
        return self.decodes + [entry.row for entry in self.scheduled]

    @property
    def num_rows(self) -> int:
        """How many compute something."""
        return len(self.decodes) + len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        if not self.scheduled:
            return len(self.decodes)
        computed = (entry.num_tokens + len(entry.drafts) for entry in self.scheduled)
        return len(self.decodes) + sum(computed)


def single_ids(tokens: Mapping[int, list[int]]) -> list[int] | None:
    """What rows drew, one token each; None where one of them drew several."""
    try:
        return [token for (token,) in tokens.values()]
    except ValueError:
        return None


class StepResult(msgspec.Struct):
    """The outcome of a plan."""

    tokens: dict[int, list[int]] = {}
    """row -> the ids that it drew, for each that decodes or has `samples` set and did not fail: one
    more than there were drafts before the first wrong one. They may go on past the stream's end."""
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """Of all drawn tokens, by row, where they were asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """row -> one entry for each prompt position computed in this step, in order.

    The entry for position p (p >= 1) describes prompt token p given the tokens before it; the
    chunk [start, start + n) yields the entries of positions start+1 .. start+n that are prompt.
    """
    errors: dict[int, str] = {}
    """row -> why this request alone cannot go on (for example a media blob that expired)."""
    hopeless: set[int] = set()
    """Those of `errors` whose own parameters are the reason: no other worker could go on."""
