"""Drafter: a second model that guesses what rows draw next, in the step that drew their last token.

It draws with a row's own noise, so that it agrees with the model wherever their logits are close.
What it guesses is verified in the next step: a wrong guess costs time and changes no token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import torch

from tokenmesh.engine.exec.media import step_media
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.layers.step import NO_MEDIA, HostStep, StepMedia
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import ScheduledRow, StepPlan
from tokenmesh.engine.sampling.sampler import Drafted, Sampler
from tokenmesh.shared.config.draft_tree import DraftTree

MAX_BEHIND: Final = 64
"""Tokens that the drafter did not read and that it reads at once. Before them it leaves a gap,
whose keys are those of another stream: that costs accepted drafts."""


class DraftModel(Protocol):
    """It holds what guesses: a decoder of its own, or a head on the model's hidden states."""

    @property
    def shift(self) -> int:
        """By how much a token's position here is smaller than its own: a head reads a token
        together with the state of the one before it."""

    @property
    def max_position(self) -> int:
        """It reads no positions from here on."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def position_rows(self) -> int:
        """Those that it reads of the model's, see `MediaFacts`; 1: places count."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model whose inputs it reads, see `Taps`; empty: none."""

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        """Return what each layer keeps between steps."""

    @property
    def grouping(self) -> Grouping:
        """Return which layers share a block table."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights and activations."""

    def embed(self, token_ids: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """Tokens [T], with the states before them [T, width], where it reads some -> [T, hidden].

        States are the model's own, or what `forward` answered for the tokens before."""

    def forward(self, hidden: torch.Tensor, step: HostStep, store: KvStore) -> torch.Tensor:
        """hidden [T, hidden] -> [T, hidden], for `logits` and as states of the next tokens."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> float32 [N, vocab_size], a new tensor."""

    def states(self, hidden: torch.Tensor, taps: torch.Tensor | None) -> torch.Tensor:
        """Return what it reads of the model's final states [T, hidden] and of `taps` [T, layers,
        hidden]; called where `shift` is not 0."""


class DrawnApart(NamedTuple):
    """Drafts of a row, and with which probabilities [V] each was drawn."""

    num_known: int
    """The row's tokens before them."""
    token_ids: list[int]
    probs: list[torch.Tensor]


class DraftFeed(NamedTuple):
    """Tokens of a row that the drafter reads in one pass."""

    row: int
    first: int
    """The position of the first of them in the stream."""
    token_ids: Sequence[int]
    state: int = 0
    """The batch token of the model whose state belongs to the first of them."""
    num_drafts: int = 0


@dataclass(slots=True)
class Drafter:
    """A draft model, and what it keeps of each row. Its blocks are those of the model's first
    KV group, so all that happens to these happens to its keys and values as well."""

    model: DraftModel
    store: KvStore
    """With `num_blocks` blocks for each KV group of the draft model."""
    num_blocks: int
    rows: HostRows
    sampler: Sampler
    max_proposed: int
    load: Callable[[LanguageModel], DraftModel]
    """The draft model again, for the model it drafts for."""
    draws_apart: bool = False
    """Drafts are drawn with a noise of their own, see `Sampler.guess_apart`."""
    tree: DraftTree | None = None
    """None: drafts do not branch."""
    _apart: dict[int, "DrawnApart"] = field(default_factory=dict)
    """The last drafts of each row that were drawn so."""
    _read: dict[int, int] = field(default_factory=dict)
    """By row: how many of its tokens it has read."""

    def drop_model(self) -> None:
        """Let go of the weights; nothing may be proposed before `take_model`."""
        del self.model

    def take_model(self, drafted: LanguageModel) -> None:
        """Read the weights again, for a model that was read again. Raises CheckpointError."""
        self.model = self.load(drafted)

    def note_rows(self, plan: StepPlan) -> None:
        """Rows change, in every step."""
        for number in plan.removed_rows:
            self._read.pop(number, None)
            self._apart.pop(number, None)
        if plan.new_rows:
            starts = {entry.row: entry.start for entry in plan.scheduled}
            for new in plan.new_rows:
                # blocks of a shared prefix were read for another row
                self._read[new.row] = starts.get(new.row, 0)

    def propose(
        self,
        plan: StepPlan,
        batch: HostStep,
        drawn: dict[int, list[int]],
        hidden: torch.Tensor,
        taps: torch.Tensor | None = None,
        taken: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[int, list[int]]:
        """Read what the step computed and drew, see `StepResult.drafts`.

        hidden: the model's final states of the batch [T, hidden]; taps: see `Taps.states`. taken:
        see `Branches.settle`.
        """
        followed = [entry for entry in plan.scheduled if entry.is_followed]
        feeds = [feed for feed in self._feeds(followed, batch, drawn, taken) if feed.token_ids]
        if not feeds:
            return {}
        if not self.model.shift:
            return self._draft(feeds, None)
        spans = ((feed.state, len(feed.token_ids)) for feed in feeds)
        index = torch.tensor([first + place for first, count in spans for place in range(count)])
        hidden, taps = hidden[index], None if taps is None else taps[index]
        return self._draft(feeds, self.model.states(hidden, taps))

    def _feeds(
        self,
        entries: Sequence[ScheduledRow],
        batch: HostStep,
        drawn: dict[int, list[int]],
        taken: Mapping[int, int],
    ) -> Iterator[DraftFeed]:
        """Return what each row has new, in the order of a batch."""
        first_of = {}
        if self.model.shift:
            first = 0
            for number, count in zip(batch.numbers, batch.counts, strict=True):
                first_of[number] = first
                first += count
        found = []
        for entry in entries:
            if entry.samples and entry.row not in drawn:
                continue  # it failed
            table = taken.get(entry.row, entry.row)
            found.append(self._feed(entry, first_of.get(table, 0)))
        yield from sorted(found, key=lambda each: (len(each.token_ids) > 1, each.first))

    def _feed(self, entry: ScheduledRow, state: int) -> DraftFeed:
        row, shift = self.rows[entry.row], self.model.shift
        end = len(row.token_ids) if entry.samples else entry.start + entry.num_tokens + shift
        if shift:
            # the states of other tokens are gone
            first = entry.start + shift
        else:
            first = max(self._read.get(entry.row, 0), end - max(MAX_BEHIND, entry.num_tokens))
        last = min(end, shift + min(self._capacity(entry.row), self.model.max_position))
        self._read[entry.row] = max(first, last)
        is_whole = first < last == end
        return DraftFeed(
            entry.row,
            first - shift,
            row.token_ids[first:last],
            state,
            min(entry.num_proposed, self.max_proposed) if entry.samples and is_whole else 0,
        )

    def _capacity(self, number: int) -> int:
        """Tokens that the row's blocks hold."""
        return self.rows[number].num_blocks * self.store.page_size

    def _draft(
        self, feeds: Sequence[DraftFeed], states: torch.Tensor | None
    ) -> dict[int, list[int]]:
        token_ids = torch.tensor([token for feed in feeds for token in feed.token_ids])
        counts = [len(feed.token_ids) for feed in feeds]
        starts = [feed.first for feed in feeds]
        hidden = self._forward([feed.row for feed in feeds], starts, counts, token_ids, states)
        drafts: dict[int, list[int]] = {}
        ends, end, going = [], 0, []
        for feed, count in zip(feeds, counts, strict=True):
            end += count
            if feed.num_drafts:
                going.append(feed)
                ends.append(end - 1)
                drafts[feed.row] = []
        if not going:
            return drafts
        hidden = hidden[torch.tensor(ends)]
        if self.tree is not None:
            return self._draft_branches(self.tree, going, hidden)
        for place in range(max(feed.num_drafts for feed in going)):
            if place:
                kept = [index for index, feed in enumerate(going) if self._goes_on(feed, place)]
                if not kept:
                    break
                if len(kept) < len(going):
                    going, hidden = [going[index] for index in kept], hidden[torch.tensor(kept)]
                rows = [feed.row for feed in going]
                starts = [feed.first + len(feed.token_ids) - 1 + place for feed in going]
                token_ids = torch.tensor([drafts[row][-1] for row in rows])
                # in the order of a batch: that of their starts
                order = sorted(range(len(going)), key=starts.__getitem__)
                going = [going[index] for index in order]
                at = torch.tensor(order)
                hidden = self._forward(
                    [feed.row for feed in going],
                    [starts[index] for index in order],
                    [1] * len(going),
                    token_ids[at],
                    hidden[at] if self.model.shift else None,
                )
            rows = [feed.row for feed in going]
            for row, token in zip(rows, self._guessed(rows, hidden, place), strict=True):
                drafts[row].append(token)
        return drafts

    def _draft_branches(
        self, tree: DraftTree, going: Sequence[DraftFeed], hidden: torch.Tensor
    ) -> dict[int, list[int]]:
        """Draft the first `num_drafts` of a tree for each row, whose last hidden states are given.

        Depth first: drafts for one position have their keys in the same place, one after the
        other. All rows draft what the one with the most does."""
        count = max(feed.num_drafts for feed in going)
        deepest = tree.depth_of(count)
        kept = [index for index, feed in enumerate(going) if self._has_room(feed, deepest - 1)]
        kept.sort(key=lambda index: going[index].first + len(going[index].token_ids))
        going = [going[index] for index in kept]
        if not going:
            return {}
        rows = [feed.row for feed in going]
        drafts: dict[int, list[int]] = {row: [0] * count for row in rows}
        states = {-1: hidden[torch.tensor(kept)]}
        guesses = {-1: self._guessed_several(rows, states[-1], 0, tree.children_of(-1))}
        for place in sorted(range(count), key=tree.paths.__getitem__):
            path, parent = tree.paths[place], tree.parents[place]
            for row, tokens in zip(rows, guesses[parent], strict=True):
                drafts[row][place] = tokens[path[-1]]
            children = tree.children_of(place)
            if place not in tree.parents[:count]:
                continue
            starts = [feed.first + len(feed.token_ids) - 1 + len(path) for feed in going]
            token_ids = torch.tensor([drafts[row][place] for row in rows])
            before = states[parent] if self.model.shift else None
            states[place] = self._forward(rows, starts, [1] * len(rows), token_ids, before)
            guesses[place] = self._guessed_several(rows, states[place], len(path), children)
        return {feed.row: drafts[feed.row][: feed.num_drafts] for feed in going}

    def _guessed_several(
        self, rows: Sequence[int], hidden: torch.Tensor, place: int, count: int
    ) -> list[list[int]]:
        """The likeliest drafts of each row in that place."""
        return self.sampler.guess_several(rows, self.model.logits(hidden), place, count)

    def _guessed(self, rows: Sequence[int], hidden: torch.Tensor, place: int) -> list[int]:
        """Draw a draft of each row in that place."""
        logits = self.model.logits(hidden)
        if not self.draws_apart:
            return self.sampler.guess(rows, logits, place)
        tokens, probs = self.sampler.guess_apart(rows, logits, place)
        for row, token, drawn_with in zip(rows, tokens, probs, strict=True):
            if drawn_with is None:
                continue
            if not place:
                self._apart[row] = DrawnApart(len(self.rows[row].token_ids), [], [])
            self._apart[row].token_ids.append(token)
            self._apart[row].probs.append(drawn_with)
        return tokens

    def with_probs(self, drafted: list[Drafted]) -> list[Drafted]:
        """Add the probabilities with which drafts were drawn apart."""
        return [self._with_probs(each) for each in drafted] if self.draws_apart else drafted

    def _with_probs(self, drafted: Drafted) -> Drafted:
        apart = self._apart.pop(drafted.row, None)
        count = len(drafted.token_ids)
        is_same = (
            apart is not None
            and apart.num_known == len(self.rows[drafted.row].token_ids)
            and apart.token_ids[:count] == drafted.token_ids
        )
        return replace(drafted, probs=apart.probs[:count]) if apart and is_same else drafted

    def _goes_on(self, feed: DraftFeed, place: int) -> bool:
        """Return whether the row wants a draft in that place, and there is room for the one
        before."""
        return place < feed.num_drafts and self._has_room(feed, place)

    def _has_room(self, feed: DraftFeed, place: int) -> bool:
        """Return whether the draft before that place can be read."""
        position = feed.first + len(feed.token_ids) - 1 + place
        return position < min(self._capacity(feed.row), self.model.max_position)

    def _forward(
        self,
        numbers: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        token_ids: torch.Tensor,
        states: torch.Tensor | None,
    ) -> torch.Tensor:
        spans = zip(starts, counts, strict=True)
        lengths = [start + place + 1 for start, count in spans for place in range(count)]
        tables, own = self.rows.tables, list(numbers)
        windowed: list[torch.Tensor] = []
        num_groups = len(self.store.grouping.windows)
        if num_groups > 1:
            # its groups share no memory: the same block of each is one of its own
            tables, own = tables[torch.tensor(own)], list(range(len(own)))
            windowed = [tables + group * self.num_blocks for group in range(1, num_groups)]
        step = HostStep(
            starts=list(starts),
            counts=list(counts),
            numbers=own,
            all_tables=tables,
            page_size=self.store.page_size,
            token_lengths=lengths,
            windowed_tables=windowed,
            media=self._positions(numbers, starts, counts),
        )
        return self.model.forward(self.model.embed(token_ids, states), step, self.store)

    def _positions(
        self, numbers: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> StepMedia:
        """Those of the model, where prompts with media have other ones than places."""
        count = self.model.position_rows
        if count == 1:
            return NO_MEDIA
        spans = zip(numbers, starts, counts, strict=True)
        entries = [(self.rows[number], start, size) for number, start, size in spans]
        return StepMedia(positions=step_media(entries, count, ()).positions)
