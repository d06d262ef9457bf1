"""Speculating: requests that compute drafts of their next tokens along with the last known one.

The output does not depend on the drafts: the runner draws every token as it would without them, and
continues with the next only where the draft was what it drew. Drafts change the speed only.
"""

from collections.abc import Mapping, Sequence
from sys import maxsize
from typing import NamedTuple

from tokenmesh.engine.core.block_reclaimer import BlockReclaimer
from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.core.service_queue import service_order
from tokenmesh.engine.kv.prefix_cache import PrefixCache, Registered
from tokenmesh.engine.plan import ScheduledRow, StepPlan
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.speculate.runner_drafts import RunnerDrafts
from tokenmesh.shared.config.draft_tree import kept_of


class DraftTotals(NamedTuple):
    """Counts since the engine started, of rows that landed; none of them ever goes down."""

    drafts: int = 0
    """Rows of steps that had drafts."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that are tokens of their streams now."""
    accepted_by_place: tuple[int, ...] = ()
    """The same by place among the drafts of a row, from 0."""


class Speculating:
    """Decoding requests that the wheel holds: all of their tokens but the last are computed, or a
    step is in flight that draws the next ones. They are scheduled once that has landed.

    Drafts get what others leave of a step's budget and of the free blocks. Without a proposer none
    is held.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        live: LiveRequests,
        cache: PrefixCache,
        room: BlockReclaimer,
    ) -> None:
        self._proposer = proposer
        self.is_on = proposer is not None and not proposer.only_predicted
        """It tells whether any may be held: the rest need not be called else."""
        self._predicted: set[Request] = set()
        """Requests with a prediction, where the proposer has drafts for no others."""
        self.totals = DraftTotals()
        self._max_drafts = 0 if proposer is None else proposer.max_drafts
        self._runner_drafts = proposer if isinstance(proposer, RunnerDrafts) else None
        self._tree = None if self._runner_drafts is None else self._runner_drafts.tree
        self._is_followed = False
        """True in steps whose rows the runner's drafter reads."""
        self._is_idle = True
        """True in steps with too many streams for drafts, where none of them is held any more."""
        self._pool = cache.pool
        self._live = live
        self._tables = live.tables
        self._cache = cache
        self._growth = cache.groups.growth
        self._size = cache.groups.block_size
        self._ends = live.ends
        self._room = room
        self._wheel = live.wheel
        self._grown: list[tuple[Request, list[int]]] = []
        """Requests that compute something in this step, and their new blocks for that."""
        self._entries: list[tuple[Request, ScheduledRow]] = []
        """The same once they are in the plan."""
        self._begun: list[tuple[Request, ScheduledRow]] = []
        """Requests that compute the last of their prompts in this step."""

    @property
    def awaits_landing(self) -> bool:
        """True while a step is in flight that draws for requests that are held: the next one would
        leave them out, and compute fewer rows at a time."""
        held = self._wheel.held() if self.is_on and not self._is_idle else ()
        return any(each.num_known == each.num_computed for each in held)

    def begin_step(self) -> None:
        """Hold the decoding requests, or release them where too many run; then get blocks for last
        known tokens. Others may be preempted for that, before they are in the step's plan."""
        assert self._proposer is not None
        is_wanted = len(self._live.running) <= self._proposer.max_rows
        self._is_idle = not is_wanted and not self._wheel.held()
        if self._is_idle:
            self._is_followed = False
            return
        self._exchange(is_wanted=is_wanted)
        self._is_followed = is_wanted and self._runner_drafts is not None
        self._grown, self._begun = [], []
        for request in sorted(self._landed(), key=service_order):
            if request not in self._wheel:
                continue  # preempted for one before it
            if request.num_known == request.decode_end:
                self._wheel.leave_at_end(request)
                continue
            new_blocks = self._make_room(request)
            if new_blocks is not None:
                self._grown.append((request, new_blocks))

    def _exchange(self, *, is_wanted: bool) -> None:
        assert self._proposer is not None
        if is_wanted:
            for request in self._wheel.turning():
                if self._proposer.wants(request):
                    self._wheel.hold(request)
        for request in self._landed():
            if is_wanted and self._proposer.wants(request):
                continue
            # one that holds blocks ahead stays until it has filled them: borders are at full ones
            if request.kv.capacity - request.num_known < self._size:
                self._wheel.enter(request)

    def _make_room(self, request: Request) -> list[int] | None:
        """New blocks for its last known token; None where the request itself was preempted."""
        length = request.num_known
        if length <= request.kv.capacity:
            return []
        self._tables.drop_behind(request, length - 1)
        return [self._tables.grow(request)] if self._room.make(request, self._growth) else None

    def schedule(self, plan: StepPlan) -> list[Registered]:
        """Plan the last known tokens of those that have not given way; blocks that these fill."""
        if self._is_idle:
            return []
        self._entries = []
        registered = []
        for request, new_blocks in self._grown:
            if request not in self._wheel:
                continue
            length = request.num_known
            windowed = self._tables.take_new(request)
            entry = ScheduledRow(request.place.row, length - 1, 1, new_blocks, True, windowed)
            plan.scheduled.append(entry)
            self._entries.append((request, entry))
            registered += self._cache.register(request, length - 1, length)
            self._wheel.advance(request, 1)
            if length == request.spec.max_len - 1:
                self._ends.expect_end(request)
        return registered

    def follow(self, request: Request, entry: ScheduledRow) -> None:
        """Known tokens of a prompt are planned: the runner's drafter reads them, too."""
        entry.is_followed = self._is_followed
        if entry.samples and self._is_followed:
            self._begun.append((request, entry))

    def draft(self, plan: StepPlan, budget: int) -> None:
        """Add drafts to what was planned, at most so many in all, and ask the runner for those of
        the next step."""
        if self._is_idle:
            return
        self._add_drafts(plan, budget)
        if self._is_followed and self._runner_drafts is not None:
            self._ask(self._runner_drafts, plan)

    def _ask(self, runner_drafts: RunnerDrafts, plan: StepPlan) -> None:
        entries, rows = [], []
        for request, entry in [*self._entries, *self._begun]:
            # after a token that is drawn in any case
            limit = request.decode_end - 2 - request.num_known
            if limit > 0:
                entries.append(entry)
                rows.append((request, self._within(limit, maxsize)))
        if not rows:
            return
        asked = runner_drafts.ask(rows, plan.num_rows)
        for (request, _), entry, number in zip(rows, entries, asked, strict=True):
            entry.num_proposed = number
            entry.is_followed = entry.is_followed or number > 0
            if number and self._wheel.is_held(request):
                # the drafter writes its keys behind those of the drafts that are verified
                ahead = self._ahead(len(entry.drafts)) + self._ahead(number)
                self._grow(request, entry, min(ahead, request.decode_end - 2 - request.num_known))

    def _add_drafts(self, plan: StepPlan, budget: int) -> None:
        assert self._proposer is not None
        entries, rows = [], []
        for request, entry in self._entries:
            # with all of them right, one more is drawn
            limit = self._within(request.decode_end - 1 - request.num_known, budget)
            if limit > 0:
                entries.append(entry)
                rows.append((request, limit))
        if not rows:
            return
        proposed = self._proposer.propose(rows, plan.num_rows)
        for (request, limit), entry, ids in zip(rows, entries, proposed, strict=True):
            drafts = ids[:limit]
            count = min(len(drafts), self._within(limit, budget))
            ahead = self._grow(request, entry, self._ahead(count))
            entry.drafts = drafts[: min(count, self._within(ahead, budget))]
            if self._tree is not None:
                entry.parents = list(self._tree.parents[: len(entry.drafts)])
            budget -= entry.num_computed - entry.num_tokens

    def _within(self, ahead: int, budget: int) -> int:
        """Return how many drafts are so many tokens ahead at most, and fit the budget."""
        if self._tree is not None:
            return self._tree.within(ahead, budget)
        return min(ahead, self._max_drafts, budget)

    def _ahead(self, count: int) -> int:
        """Return how many tokens ahead so many drafts are."""
        return count if self._tree is None else self._tree.depth_of(count)

    def note_step(self, plan: StepPlan, duration_s: float) -> None:
        """A step without tokens of prompts took so long."""
        if self._proposer is None or not self.is_on or plan.num_rows > self._proposer.max_rows:
            return
        num_drafts = sum(len(entry.drafts) for entry in plan.scheduled)
        if self._runner_drafts is not None:
            num_proposed = sum(entry.num_proposed for entry in plan.scheduled)
            if bool(num_drafts) != bool(num_proposed):
                return  # drafting begins or ends: it costs less or more than it does later
            num_drafts = max(num_drafts, num_proposed)
        self._proposer.note_step(plan.num_rows, num_drafts, duration_s)

    @property
    def num_bytes(self) -> int:
        """Memory of what the proposer keeps of the streams."""
        return 0 if self._proposer is None else self._proposer.num_bytes

    def count(
        self,
        plan: StepPlan,
        owners: Mapping[int, Request | None],
        num_drawn: Mapping[int, int],
        tokens: Mapping[int, list[int]],
    ) -> None:
        """Count the drafts of rows that landed, once what is past a stream's end is cut off."""
        drafts, draft_tokens, accepted_tokens, by_place = self.totals
        places = [*by_place, *[0] * (self._max_drafts - len(by_place))]
        for entry in plan.scheduled:
            request = owners.get(entry.row)
            if not entry.drafts or request is None:
                continue
            # where a stream ended, all that is left of what it drew were drafts
            accepted = min(num_drawn[entry.row] - 1, len(tokens[entry.row]))
            drafts += 1
            draft_tokens += len(entry.drafts)
            accepted_tokens += accepted
            for place in range(accepted):
                places[place] += 1
            request.output.num_drafts += len(entry.drafts)
            request.output.num_accepted += accepted
            if self._tree is not None and self._runner_drafts is not None:
                kept = kept_of(entry.drafts, entry.parents, tokens[entry.row][:accepted])
                self._runner_drafts.note_branches(request, len(entry.drafts), kept)
            elif self._runner_drafts is not None:
                self._runner_drafts.note_landed(request, len(entry.drafts), accepted)
        self.totals = DraftTotals(drafts, draft_tokens, accepted_tokens, tuple(places))

    def land(self, drawn: Sequence[Request | None], tokens: Mapping[int, list[int]]) -> set[int]:
        """Append what rows drew, where one of them drew several: up to the end of its stream, and
        what is past that is taken out of `tokens` as well. Returns all rows."""
        for new, request in zip(tokens.values(), drawn, strict=True):
            if request is None:
                continue
            first = request.num_known
            _append(request, new)
            if self._wheel.is_held(request):
                # all but the last are drafts that were computed
                self._wheel.advance(request, request.num_known - 1 - first)
                self._cache.register(request, first, request.num_known - 1, in_step=False)
        return set(tokens)

    def note(self, request: Request, drafts: list[int]) -> None:
        """Note what the runner's drafter proposes after the tokens of a step that has landed."""
        if self._runner_drafts is not None:
            self._runner_drafts.note(request, drafts)

    def expect(self, request: Request) -> None:
        """The request is new."""
        if request.spec.prediction and self._proposer is not None and self._proposer.only_predicted:
            self._predicted.add(request)
            self.is_on = True

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._proposer is not None and self.is_on:
            self._proposer.forget(request)
        if request in self._predicted:
            self._predicted.remove(request)
            self.is_on = bool(self._predicted)

    def _landed(self) -> list[Request]:
        return [each for each in self._wheel.held() if each.num_known > each.num_computed]

    def _grow(self, request: Request, entry: ScheduledRow, num_drafts: int) -> int:
        """For how many drafts there are blocks, with those that are free."""
        wanted = request.num_known + num_drafts
        if num_drafts and request.kv.capacity < wanted:
            self._tables.drop_behind(request, request.num_known - 1)
        while request.kv.capacity < wanted and self._pool.num_free >= self._growth:
            entry.new_blocks.append(self._tables.grow(request))
        windowed = self._tables.take_new(request)
        if windowed:
            old = entry.new_windowed or [[] for _ in windowed]
            entry.new_windowed = [a + b for a, b in zip(old, windowed, strict=True)]
        return min(num_drafts, request.kv.capacity - request.num_known)


def _append(request: Request, new: list[int]) -> None:
    for index, token in enumerate(new):
        request.token_ids.append(token)
        if request.ending() is not None:
            del new[index + 1 :]
            return
