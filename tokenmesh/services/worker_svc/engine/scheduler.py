"""Scheduler: hands one token budget a step to requests, so that computed catches up with known.

Chunked prefill, decode, prefix hits, resumption and preemption are that one rule. Pure Python on
ints and lists; the runner learns of everything through the plan. A step may be scheduled before
the tokens of the one before it are known: then a decoding request computes a token without an id.
"""

from itertools import count
from typing import Final

from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.limits import Limits
from tokenmesh.services.worker_svc.engine.plan import NewRow, RowResult, ScheduledRow, StepPlan
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.queues import ServiceQueue
from tokenmesh.services.worker_svc.engine.recent_use import RecentUse
from tokenmesh.services.worker_svc.engine.request import Request, Status
from tokenmesh.services.worker_svc.engine.row_table import RowTable
from tokenmesh.services.worker_svc.engine.sharing import Sharing
from tokenmesh.services.worker_svc.engine.step_notes import StepNotes
from tokenmesh.services.worker_svc.engine.waiting_line import WaitingLine

_NO_BLOCKS: Final[list[int]] = []


class Scheduler:
    """Owns waiting and running requests, their rows and their blocks.

    `num_computed` advances when tokens are scheduled; a step that fails is taken back by
    `preempt` or `remove` after `PrefixCache.retract`.
    """

    def __init__(self, limits: Limits, pool: BlockPool, cache: PrefixCache) -> None:
        self._limits = limits
        self._pool = pool
        self._cache = cache
        self._running = ServiceQueue()
        self._arrivals = count()
        self._steps = count()
        self.rows = RowTable(limits.max_num_seqs)
        self.recent = RecentUse(limits.max_num_seqs, limits.max_num_batched_tokens)
        """What each tenant has had lately."""
        self._waiting = WaitingLine(self.rows, self.recent)
        self._sharing = Sharing(
            self._running, self._waiting, self.rows, pool, self.preempt, self._fits, self.recent
        )
        self.num_queued_tokens = 0
        """Sum of `backlog` over all requests."""
        self.notes = StepNotes()
        """About the latest step."""

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Take a request; its tokens must fit the pool."""
        assert -(-(request.max_len - 1) // self._limits.block_size) < self._pool.num_blocks
        request.arrival = next(self._arrivals)
        request.status = Status.WAITING
        request.num_expected = len(self._cache.find(request)) * self._limits.block_size
        self._waiting.add(request)
        self.num_queued_tokens += request.backlog

    def remove(self, request: Request) -> None:
        """The request ends, wherever it is; its row and blocks are free at once."""
        if request.status is Status.RUNNING:
            self.num_queued_tokens -= request.backlog
            self._running.remove(request)
            self._release(request)
        elif request.status is Status.WAITING:
            self.num_queued_tokens -= request.backlog
            self._waiting.remove(request)
        request.status = Status.ENDED

    def preempt(self, request: Request) -> None:
        """Send a running request back to wait; all it knows will be computed again."""
        self._running.remove(request)
        self._requeue(request)

    def schedule(self) -> StepPlan:
        """The next step. Computes nothing only when all that requests need is in flight."""
        plan = StepPlan(step=next(self._steps))
        self.notes = StepNotes()
        self.rows.expect_no_late()
        limits = self._limits
        is_short = self._sharing.begin_step(limits.max_num_batched_tokens, limits.block_size)
        budget, has_preempted = self._schedule_running(plan)
        if not has_preempted and not is_short:
            self._admit(plan, budget)
        prefills = ((request.owner, tokens) for request, tokens, _ in self.notes.prefills)
        self.recent.note(self.rows.by_tenant, prefills)
        if plan.scheduled:
            plan.removed_rows = self.rows.take_removed()
        return plan

    def draw(self, step: int, sampled: list[RowResult]) -> tuple[list[Request | None], set[int]]:
        """Append what a step drew: whose tokens they are, in order, and rows maybe at their end.

        A token belongs to nobody when its request has ended since the launch.
        """
        drawn: list[Request | None] = []
        may_end = set()
        by_row = self.rows.requests
        for result in sampled:
            request = by_row[result.row]
            if request is None:
                request = self.rows.late_owner(result.row)
                self.num_queued_tokens += request is not None
            elif request.admitted_step > step:
                request = None
            if request is None:
                drawn.append(None)
                continue
            tokens = request.token_ids
            token = result.token_id
            tokens.append(token)
            drawn.append(request)
            length = len(tokens)
            if token in request.stop_ids or length >= request.plain_until:
                may_end.add(result.row)
                if length == request.capacity and length == request.num_computed:
                    # the latest step computes this very token: the block's content is known now
                    self._register(request, length - 1, length)
        return drawn, may_end

    def _schedule_running(self, plan: StepPlan) -> tuple[int, bool]:
        """Give running requests their tokens; what is left, and whether that preempted anybody."""
        budget = self._limits.max_num_batched_tokens
        is_alone = len(self._running) + len(self._waiting) == 1
        scheduled = plan.scheduled
        num_gave_way = len(self.notes.preempted)
        for request in self._running:
            if budget == 0:
                break
            start = request.num_computed
            end = start + 1
            # the hot path: a decoding request has exactly one token to compute, known or not
            if end < request.plain_until:
                request.num_computed = end
                scheduled.append(ScheduledRow(request.row, start, 1, _NO_BLOCKS, True))
                budget -= 1
            elif request.is_prefilling:
                scheduled += self._continue_prefill(request, budget, is_alone=is_alone)
                budget -= request.num_computed - start
            # else that token is its last, and on its way
            elif end < request.max_len and (end <= request.capacity or self._make_room(request)):
                scheduled.append(self._schedule_at_border(request))
                budget -= 1
        return budget, len(self.notes.preempted) > num_gave_way

    def _schedule_at_border(self, request: Request) -> ScheduledRow:
        """A decode that fills a block, or that begins one: there is room for it."""
        start = request.num_computed
        end = request.num_computed = start + 1
        new_blocks = self._grow(request) if end > request.capacity else _NO_BLOCKS
        if end == request.capacity and end <= len(request.token_ids):
            self._register(request, start, end)
        return ScheduledRow(request.row, start, 1, new_blocks, True)

    def _continue_prefill(
        self, request: Request, budget: int, *, is_alone: bool
    ) -> list[ScheduledRow]:
        """Nothing when the tenant's share of the step is used up."""
        start = request.num_computed
        pending = len(request.token_ids) - start
        num_tokens = self._chunk(request, pending, budget, is_alone=is_alone)
        if not num_tokens:
            return []
        self._note_prefill(request, num_tokens, 0)
        request.num_computed = start + num_tokens
        self._register(request, start, request.num_computed)
        return [ScheduledRow(request.row, start, num_tokens, _NO_BLOCKS, num_tokens == pending)]

    def _make_room(self, request: Request) -> bool:
        """One free block, from whoever is served last; False when that is `request` itself."""
        while self._pool.num_free == 0:
            victim = self._running.pop_last()
            self.rows.expect_late(victim)
            self._requeue(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: Request) -> list[int]:
        new_blocks = self._pool.allocate(1)
        request.blocks += new_blocks
        request.capacity += self._limits.block_size
        request.note_borders()
        return new_blocks

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and self.rows.has_free and len(self._waiting):
            request = self._waiting.first
            found = self._find_blocks(request)
            if found is None:
                break
            self._waiting.remove(request)
            self._place(request, *found, plan.step)
            budget -= self._schedule_first_chunk(plan, request, budget)

    def _fits(self, request: Request) -> bool:
        return self._find_blocks(request) is not None

    def _find_blocks(self, request: Request) -> tuple[list[int], int] | None:
        """Hits and how many blocks come after them; None when there are not enough."""
        hits = self._cache.find(request)
        num_new = -(-request.num_known // self._limits.block_size) - len(hits)
        num_revived = sum(self._pool.ref_count(block) == 0 for block in hits)
        # a request alone always fits: `add` saw to that
        reserve = self._limits.watermark_blocks if len(self._running) else 0
        fits = num_revived + num_new + reserve <= self._pool.num_free
        return (hits, num_new) if fits else None

    def _place(self, request: Request, hits: list[int], num_new: int, step: int) -> None:
        """Give a row, the hits, and blocks for every known token: a prefill never runs dry."""
        self._pool.share(hits)
        request.blocks = hits + self._pool.allocate(num_new)
        request.capacity = len(request.blocks) * self._limits.block_size
        self.num_queued_tokens -= request.backlog
        request.num_computed = len(hits) * self._limits.block_size
        request.num_expected = 0
        self.num_queued_tokens += request.backlog
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
        self.rows.give(request, step)
        request.status = Status.RUNNING
        self._running.add(request)

    def _schedule_first_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        start = request.num_computed
        pending = request.num_known - start
        is_alone = len(self._running) == 1 and not len(self._waiting)
        # whoever has a row goes on by at least a token
        num_tokens = max(1, self._chunk(request, pending, budget, is_alone=is_alone))
        plan.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=list(request.token_ids),
                num_prompt=request.num_prompt,
                sampling=request.sampling,
                media=request.media,
                wants_prompt_logprobs=request.wants_prompt_logprobs,
                embeddings=request.embeddings,
                grammar=request.grammar,
            )
        )
        is_last = num_tokens == pending
        self._note_prefill(request, num_tokens, start)
        plan.scheduled.append(
            ScheduledRow(request.row, start, num_tokens, list(request.blocks), is_last)
        )
        request.num_computed = start + num_tokens
        self._register(request, start, request.num_computed)
        return num_tokens

    def _chunk(self, request: Request, pending: int, budget: int, *, is_alone: bool) -> int:
        threshold = self._limits.long_prefill_token_threshold
        if threshold and not is_alone:
            pending = min(pending, threshold)
        return self._sharing.take(request, min(pending, budget))

    def _register(self, request: Request, start: int, end: int) -> None:
        self.notes.registered += self._cache.register(request, start, end)

    def _note_prefill(self, request: Request, num_tokens: int, num_cached: int) -> None:
        """Before `num_computed` advances."""
        self.num_queued_tokens -= num_tokens
        request.is_prefilling = request.num_computed + num_tokens < request.num_known
        request.note_borders()
        self.notes.prefills.append((request, num_tokens, num_cached))

    def _requeue(self, request: Request) -> None:
        """Give row and blocks back and wait; the request has left the running ones already."""
        self._release(request)
        self.num_queued_tokens -= request.backlog
        request.num_computed = 0
        request.is_prefilling = True
        request.note_borders()
        request.status = Status.WAITING
        request.num_preemptions += 1
        request.prompt_logprobs.clear()
        self.notes.preempted.append(request)
        self.num_queued_tokens += request.backlog
        self._waiting.add(request)

    def _release(self, request: Request) -> None:
        self._pool.free(request.blocks)
        request.blocks = []
        request.capacity = 0
        self.rows.take(request)
