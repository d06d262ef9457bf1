"""StepPlan and StepResult: all that scheduler and runner say to each other.

A request keeps one row (0 .. max_num_seqs-1) from admission to its end or preemption. The runner
keeps per-row state (ids, block table, sampling state) and learns about changes only from here.
What there is one of per row and step is a msgspec struct: those are made three times as fast.
"""

from dataclasses import dataclass, field

import msgspec

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


class ScheduledRow(msgspec.Struct, gc=False):
    """What one row does in this step: compute tokens [start, start + num_tokens).

    The last of them may be one that the row draws in a step still in flight: nobody but the
    runner knows its id.
    """

    row: int
    start: int
    num_tokens: int
    new_blocks: list[int]
    """Block ids appended to the row's table in this step (after a prefix hit: all of them)."""
    samples: bool
    """True when the last known token is among those computed, so a next one is drawn."""


@dataclass(slots=True)
class StepPlan:
    """One engine iteration. Apply removed, then new, then scheduled.

    A row number may be removed and given to another request in the same plan. After a step that
    failed, `removed_rows` may name rows that the runner never came to know.
    """

    step: int
    removed_rows: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    scheduled: list[ScheduledRow] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(entry.num_tokens for entry in self.scheduled)


class RowResult(msgspec.Struct, gc=False):
    """What the runner drew for one row with `samples` set."""

    row: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class StepResult:
    """The outcome of a plan."""

    sampled: list[RowResult] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """row -> one entry for each prompt position computed in this step, in order.

    The entry for position p (p >= 1) describes prompt token p given the tokens before it; the
    chunk [start, start + n) yields the entries of positions start+1 .. start+n that are prompt.
    """
    errors: dict[int, str] = field(default_factory=dict)
    """row -> why this request alone cannot go on (for example a media blob that expired)."""
    hopeless: set[int] = field(default_factory=set)
    """Those of `errors` whose own parameters are the reason: no other worker could go on."""
