"""Scheduler: hands one token budget a step to requests, so that computed catches up with known.

Chunked prefill, decode, prefix hits, resumption and preemption are that one rule. Pure Python on
ints and lists; the runner gets everything from the plan. A step may be scheduled before
the tokens of the one before it are known: then a decoding request computes a token without an id.
Streams that decode are many and seldom need anything, so nothing here looks at each in every step.
"""

from collections.abc import Mapping
from itertools import count

from tokenmesh.engine.core.admission import RowAdmission
from tokenmesh.engine.core.block_reclaimer import BlockReclaimer
from tokenmesh.engine.core.in_flight import StepNotes
from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.core.prefill import Prefill
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.core.row_table import Drawn
from tokenmesh.engine.core.service_queue import service_order
from tokenmesh.engine.core.sharing import Sharing
from tokenmesh.engine.core.speculating import Speculating
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.plan import StepPlan, single_ids
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.config.worker import WorkerSettings


class Scheduler:
    """Plans steps for live requests, and notes what they drew.

    `num_computed` advances when tokens are scheduled; `preempt` and `remove` undo a failed step.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        cache: PrefixCache,
        proposer: Proposer | None = None,
        num_lanes: int = 1,
    ) -> None:
        self._budget = settings.max_num_batched_tokens
        self._cache = cache
        self._pool = cache.pool
        self._groups = cache.groups
        self.live = live = LiveRequests(settings, cache, num_lanes)
        self.rows = live.rows
        self._tables = live.tables
        self._wheel = live.wheel
        self._ends = live.ends
        self._filling: list[Request] = []
        """Whose block the latest step fills with a token that was not known then."""
        self._steps = count()
        self._sharing = Sharing(live, cache)
        self._room = BlockReclaimer(live, cache.pool)
        self.speculating = Speculating(proposer, live, cache, self._room)
        self._prefill = Prefill(settings, cache, live, self._sharing, self.speculating)
        self._admission = RowAdmission(live, self._prefill)

    @property
    def notes(self) -> StepNotes:
        """About the latest step."""
        return self.live.notes

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that hold a row, and requests that wait for one."""
        return len(self.live.running), len(self.live.waiting)

    def add(self, request: Request) -> None:
        """Take a request; its tokens must fit the pool."""
        self.live.add(request)
        self.speculating.expect(request)

    def remove(self, request: Request) -> None:
        """The request ends, wherever it is; its row and blocks are free at once."""
        self.live.remove(request)
        self.speculating.forget(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back to wait; all it knows will be computed again."""
        self.live.preempt(request)

    def schedule(self, lane: int = 0) -> StepPlan:
        """The next step of a lane, of which none is in flight if there are several. Computes
        nothing only when all that the lane's requests need is in flight."""
        live = self.live
        if live.num_lanes > 1:
            live.select(lane)
        plan = StepPlan(step=next(self._steps))
        live.notes = notes = StepNotes()
        self.rows.expect_no_late()
        is_short, num_gave_way = self._sharing.begin_step(self._budget), len(notes.preempted)
        if self._groups.num_windowed:
            self._room.advance_windows()
        self._decode(plan)
        live.restart_outgrown()
        budget = self._budget - len(plan.decodes) - len(plan.scheduled)
        if len(live.prefilling):
            budget -= self._prefill.go_on(plan, budget)
        if len(live.waiting) and not is_short and len(notes.preempted) == num_gave_way:
            self._admission.admit(plan, budget)
        if self.speculating.is_on:
            self.speculating.draft(plan, self._budget - plan.num_tokens)
        prefills = [(each.request.spec.owner, each.num_tokens) for each in notes.prefills]
        live.recent.note(self.rows.by_tenant, prefills)
        if plan.num_rows:
            plan.saves = self._cache.take_saved()
            if self._cache.host is not None:
                # others wait for what is computed for them, and there may be no further step
                is_awaited = bool(notes.computed)
                plan.host_saves = self._cache.images.take_saves(plan.step, all_of_them=is_awaited)
        self.rows.note_step(plan)
        return plan

    def plan_saves(self) -> StepPlan:
        """A step that computes nothing and saves blocks, of an engine that has nothing else to do:
        those that were filled last."""
        plan = StepPlan(step=next(self._steps))
        plan.host_saves = self._cache.images.take_saves(plan.step, all_of_them=False)
        return plan

    def draw(self, plan: StepPlan, tokens: Mapping[int, list[int]]) -> Drawn:
        """Append what a step drew, but what is past a stream's end, which `tokens` lose as well."""
        owners, late = self.rows.owners(plan.step, tokens)
        ids = single_ids(tokens)
        has_drafts = plan.has_drafts
        num_drawn = {row: len(drawn) for row, drawn in tokens.items()} if has_drafts else {}
        if ids is None:
            ends = self.speculating.land(owners, tokens)
        else:
            ends = self._ends.rows(tokens, ids)
            for request, token in zip(owners, ids, strict=True):
                if request is not None:
                    request.token_ids.append(token)
        if has_drafts:
            by_row = dict(zip(tokens, owners, strict=True))
            self.speculating.count(plan, by_row, num_drawn, tokens)
        if late:
            ends |= late  # their end is not watched any more
            self.live.num_queued_tokens += sum(len(tokens[row]) for row in late)
        registered, register = self.live.notes.registered, self._cache.register
        for request in self._filling:
            length = len(request.token_ids)
            # a request that lost its row has no capacity
            if length == request.kv.capacity:
                # the latest step computes this token: the block's content is known now
                registered += register(request, length - 1, length)
        return owners, ends, ids

    def note_drafts(self, step: int, drafts: Mapping[int, list[int]]) -> None:
        """Note what the runner proposes after the tokens of that step, by row; they are
        appended.
        """
        for row, ids in drafts.items():
            request = self.rows.owner(row, step)
            if request is not None:
                self.speculating.note(request, ids)

    def _decode(self, plan: StepPlan) -> None:
        """Every decoding request computes its next token."""
        if self.speculating.is_on:
            self.speculating.begin_step()
        self._filling = []
        at_border = self._wheel.turn()
        is_short = self._pool.num_free < len(at_border) * self._groups.growth
        if is_short:
            at_border.sort(key=service_order)
        for request in at_border:
            # one that was preempted for another needs nothing
            if not is_short or request in self._wheel:
                self._pass_border(plan, request, is_short=is_short)
        plan.decodes = self._wheel.rows()
        if self.speculating.is_on:
            self.notes.registered += self.speculating.schedule(plan)

    def _pass_border(self, plan: StepPlan, request: Request, *, is_short: bool) -> None:
        """A decoding request fills a block, needs one, or comes to its end."""
        length = request.num_computed
        if length == request.decode_end:
            self._wheel.leave_at_end(request)
            return
        if length > request.kv.capacity:
            if request.kv.windowed:
                self._tables.drop_behind(request, length - 1)
            if is_short and not self._room.make(request, self._groups.growth):
                return
            plan.grown.append((request.place.row, self._tables.grow(request)))
            if request.kv.windowed and (windowed := self._tables.take_new(request)):
                plan.grown_windowed.append((request.place.row, [each for (each,) in windowed]))
        if length == request.kv.capacity:
            if length <= len(request.token_ids):
                self.notes.registered += self._cache.register(request, length - 1, length)
            else:
                self._filling.append(request)
        if length == request.spec.max_len - 1:
            self._ends.expect_end(request)
        self._wheel.expect_border(request, length)
