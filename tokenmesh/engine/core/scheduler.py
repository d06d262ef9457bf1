"""Scheduler: hands one token budget a step to requests, so that computed catches up with known.

Chunked prefill, decode, prefix hits, resumption and preemption are that one rule. Pure Python on
ints and lists; the runner gets everything from the plan. A step may be scheduled before
the tokens of the one before it are known: then a decoding request computes a token without an id.
Streams that decode are many and seldom need anything, so nothing here looks at each in every step.
"""

from collections.abc import Mapping
from itertools import count

from tokenmesh.engine.core.admission import fits_step, new_row_of
from tokenmesh.engine.core.block_reclaimer import BlockReclaimer
from tokenmesh.engine.core.decode_wheel import DecodeWheel
from tokenmesh.engine.core.end_detector import EndDetector
from tokenmesh.engine.core.in_flight import StepNotes
from tokenmesh.engine.core.proposing import Proposer
from tokenmesh.engine.core.recent_use import RecentUse
from tokenmesh.engine.core.row_table import Drawn, RowTable
from tokenmesh.engine.core.service_queue import ServiceQueue, service_order
from tokenmesh.engine.core.sharing import Sharing
from tokenmesh.engine.core.speculating import Speculating
from tokenmesh.engine.core.waiting import WaitingRequests
from tokenmesh.engine.kv.block_tables import BlockTables, Hits
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.media_facts import ends_outside
from tokenmesh.engine.plan import (
    ScheduledRow,
    StepPlan,
    single_ids,
)
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.shared.config.worker import WorkerSettings


class Scheduler:
    """Owns waiting and running requests, their rows and their blocks.

    `num_computed` advances when tokens are scheduled; `preempt` and `remove` undo a failed step.
    """

    def __init__(
        self, settings: WorkerSettings, cache: PrefixCache, proposer: Proposer | None = None
    ) -> None:
        self._settings = settings
        self._watermark_blocks = int(settings.kv_watermark * cache.pool.num_blocks)
        """Free blocks that an admission leaves to the running requests."""
        self._pool = pool = cache.pool
        self._cache = cache
        self._groups = groups = cache.groups
        self._tables = BlockTables(cache)
        self._running = ServiceQueue()
        self._prefilling = ServiceQueue()
        """Those of the running ones whose known tokens are not all computed."""
        self._wheel = DecodeWheel()
        """The others, but for those whose last token is on its way."""
        self._filling: list[Request] = []
        """Whose block the latest step fills with a token that was not known then."""
        self._ends = EndDetector()
        self._arrivals = count()
        self._steps = count()
        self.rows = RowTable(settings.num_rows)
        self.recent = RecentUse(settings.num_rows, settings.max_num_batched_tokens)
        """What each tenant has had lately."""
        self._waiting = WaitingRequests(self.rows, self.recent)
        held = self._running, self._prefilling, self._waiting, self.rows, pool, groups
        self._sharing = Sharing(*held, self.preempt, self._find, self.recent)
        self._room = BlockReclaimer(pool, self._tables, self._running, self.rows, self._requeue)
        self._speculating = Speculating(
            proposer, self._wheel, self._tables, cache, self._ends, self._room
        )
        self.num_queued_tokens = 0
        """Sum of `backlog` over all requests."""
        self.notes = StepNotes()
        """About the latest step."""

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that hold a row, and requests that wait for one."""
        return len(self._running), len(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request; its tokens must fit the pool."""
        if not request.spec.is_whole:
            assert self._groups.needed(request.spec.max_len - 1) < self._pool.num_blocks
        request.place.arrival = next(self._arrivals)
        request.place.status = Status.WAITING
        request.place.num_expected = len(self._cache.find(request)[0]) * self._settings.block_size
        self._waiting.add(request)
        self.num_queued_tokens += request.backlog

    def remove(self, request: Request) -> None:
        """The request ends, wherever it is; its row and blocks are free at once."""
        if request.place.status is Status.RUNNING:
            self.num_queued_tokens -= request.backlog
            self._running.remove(request)
            self._release(request)
        elif request.place.status is Status.WAITING:
            self.num_queued_tokens -= request.backlog
            self._waiting.remove(request)
        request.place.status = Status.ENDED
        self._speculating.forget(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back to wait; all it knows will be computed again."""
        self._running.remove(request)
        self._requeue(request)

    def schedule(self) -> StepPlan:
        """The next step. Computes nothing only when all that requests need is in flight."""
        plan = StepPlan(step=next(self._steps))
        self.notes = StepNotes()
        self.rows.expect_no_late()
        budget = self._settings.max_num_batched_tokens
        is_short, num_gave_way = self._sharing.begin_step(budget), len(self.notes.preempted)
        if self._groups.num_windowed:
            self._room.advance_windows(self._prefilling)
        self._decode(plan)
        for request in self._wheel.outgrown():
            self._running.remove(request)
            self._send_back(request)
        budget -= len(plan.decodes) + len(plan.scheduled)
        if len(self._prefilling):
            budget -= self._continue_prefills(plan, budget)
        if not is_short and len(self.notes.preempted) == num_gave_way:
            self._admit(plan, budget)
        if self._speculating.is_on:
            self._speculating.draft(self._settings.max_num_batched_tokens - plan.num_tokens)
        prefills = ((request.spec.owner, tokens) for request, tokens, _ in self.notes.prefills)
        self.recent.note(self.rows.by_tenant, prefills)
        if plan.num_rows:
            plan.saves = self._cache.take_saved()
        self.rows.note_step(plan)
        return plan

    def draw(self, step: int, tokens: Mapping[int, list[int]]) -> Drawn:
        """Append what a step drew, but what is past a stream's end, which `tokens` lose as well."""
        owners, late = self.rows.owners(step, tokens)
        ids = single_ids(tokens)
        if ids is None:
            ends = self._speculating.land(owners, tokens)
        else:
            ends = self._ends.rows(tokens, ids)
            for request, token in zip(owners, ids, strict=True):
                if request is not None:
                    request.token_ids.append(token)
        if late:
            ends |= late  # their end is not watched any more
            self.num_queued_tokens += sum(len(tokens[row]) for row in late)
        registered, register = self.notes.registered, self._cache.register
        for request in self._filling:
            length = len(request.token_ids)
            # a request that lost its row has no capacity
            if length == request.kv.capacity:
                # the latest step computes this token: the block's content is known now
                registered += register(request, length - 1, length)
        return owners, ends, ids

    def note_drafts(self, step: int, drafts: Mapping[int, list[int]]) -> None:
        """What the runner proposes after the tokens of that step, by row; they are appended."""
        for row, ids in drafts.items():
            request = self.rows.owner(row, step)
            if request is not None:
                self._speculating.note(request, ids)

    def _decode(self, plan: StepPlan) -> None:
        """Every decoding request computes its next token."""
        if self._speculating.is_on:
            self._speculating.begin_step(len(self._running))
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
        if self._speculating.is_on:
            self.notes.registered += self._speculating.schedule(plan)

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

    def _continue_prefills(self, plan: StepPlan, budget: int) -> int:
        """The next chunks of prompts, as far as there is budget; how much of it they take."""
        is_alone = len(self._running) + len(self._waiting) == 1
        left = budget
        for request in list(self._prefilling):
            if left <= 0:
                break
            start = request.num_computed
            pending = len(request.token_ids) - start
            num_tokens = self._chunk(request, left, is_alone=is_alone)
            if num_tokens:  # else the tenant's share of the step is used up
                plan.scheduled.append(self._compute_chunk(request, num_tokens, []))
                left -= num_tokens
                if num_tokens == pending:
                    self._prefilling.remove(request)
        return budget - left

    def _compute_chunk(
        self, request: Request, num_tokens: int, new_blocks: list[int], num_cached: int = 0
    ) -> ScheduledRow:
        """Known tokens; with the last of them the request begins to decode, unless it pools."""
        start = request.num_computed
        end = start + num_tokens
        self.num_queued_tokens -= num_tokens
        self.notes.prefills.append((request, num_tokens, num_cached))
        self._wheel.advance(request, num_tokens)
        self.notes.registered += self._cache.register(request, start, end)
        is_last, pools = end == request.num_known, request.spec.pooling is not None
        if is_last and pools:
            self._wheel.finish(request)
        elif is_last:
            self._wheel.enter(request)
            if end == request.spec.max_len - 1:
                self._ends.expect_end(request)
        row = ScheduledRow(request.place.row, start, num_tokens, new_blocks, is_last and not pools)
        row.new_windowed, row.pools = self._tables.take_new(request), is_last and pools
        row.num_proposed = self._speculating.num_proposed if row.samples else 0
        return row

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and self.rows.has_free and len(self._waiting):
            request = self._waiting.first
            hits = self._find(request)
            if hits is None or not fits_step(request, budget, plan):
                break
            self._waiting.remove(request)
            self._place(request, hits, plan.step)
            budget -= self._schedule_first_chunk(plan, request, budget)

    def _find(self, request: Request) -> Hits | None:
        return self._tables.find(request, self._watermark_blocks if len(self._running) else 0)

    def _place(self, request: Request, hits: Hits, step: int) -> None:
        self.num_queued_tokens -= request.backlog
        self._wheel.begin(request, num_cached := len(hits[0]) * self._settings.block_size)
        self._tables.give(request, hits)
        request.place.num_expected = 0
        self.num_queued_tokens += request.backlog
        if request.place.num_cached is None:
            request.place.num_cached = min(num_cached, request.num_prompt)
        self.rows.give(request, step)
        self._ends.join(request)
        request.place.status = Status.RUNNING
        self._running.add(request)

    def _schedule_first_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        is_alone = len(self._running) == 1 and not len(self._waiting)
        num_tokens = self._chunk(request, budget, is_alone=is_alone, at_least=1)
        plan.new_rows.append(new_row_of(request))
        blocks, num_cached = list(request.kv.blocks), request.num_computed
        plan.scheduled.append(self._compute_chunk(request, num_tokens, blocks, num_cached))
        if request.decode.is_prefilling:
            self._prefilling.add(request)
        return num_tokens

    def _chunk(self, request: Request, most: int, *, is_alone: bool, at_least: int = 0) -> int:
        if request.spec.is_whole:
            return request.num_known - request.num_computed
        most = min(most, request.num_known - request.num_computed)
        if (threshold := self._settings.long_prefill_token_threshold) and not is_alone:
            most = min(most, threshold)
        taken = self._sharing.take(request, self._cache.cut(request, most))
        return ends_outside(request.spec.whole_runs, request.num_computed, max(at_least, taken))

    def _requeue(self, request: Request) -> None:
        """The request was preempted and has left the running ones already."""
        self._send_back(request)
        request.place.num_preemptions += 1
        self.notes.preempted.append(request)

    def _send_back(self, request: Request) -> None:
        """Give row and blocks back and wait; everything is computed again."""
        self._release(request)
        self.num_queued_tokens -= request.backlog
        self._wheel.begin(request, 0)
        request.place.status = Status.WAITING
        self.num_queued_tokens += request.backlog
        self._waiting.add(request)

    def _release(self, request: Request) -> None:
        if request.decode.is_prefilling:
            self._prefilling.remove(request)
        else:
            self._wheel.leave(request)
        self._ends.leave(request)
        self._tables.release(request)
        self.rows.take(request)
