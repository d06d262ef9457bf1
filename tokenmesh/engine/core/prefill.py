"""Prefill: known tokens that are not computed yet, a chunk of them at a time."""

from tokenmesh.engine.core.host_fills import Fills, HostFills
from tokenmesh.engine.core.in_flight import PlannedChunk
from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.core.sharing import Sharing
from tokenmesh.engine.core.speculating import Speculating
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.media_facts import ends_outside
from tokenmesh.engine.plan import ScheduledRow, StepPlan
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.config.worker import WorkerSettings


class Prefill:
    """Plans chunks. A request whose last known token is planned begins to decode, or it pools."""

    def __init__(
        self,
        settings: WorkerSettings,
        cache: PrefixCache,
        live: LiveRequests,
        sharing: Sharing,
        speculating: Speculating,
    ) -> None:
        self._threshold = settings.long_prefill_token_threshold
        self._cache = cache
        self._live = live
        self._sharing = sharing
        self._speculating = speculating
        self._fills = HostFills(settings, cache, sharing)

    def go_on(self, plan: StepPlan, budget: int) -> int:
        """The next chunks of prompts, as far as there is budget; how much of it they take."""
        live = self._live
        is_alone = live.is_one
        left = budget
        for request in live.in_lane(live.prefilling):
            if left <= 0:
                break
            fills = self._fill(request, left, plan.step, is_alone=is_alone)
            left -= fills.cost
            pending = len(request.token_ids) - request.num_computed
            num_tokens = self._chunk(request, left, fills, is_alone=is_alone)
            if num_tokens:  # else the tenant's share of the step is used up
                plan.scheduled.append(self._compute(request, num_tokens, [], fills))
                left -= num_tokens
                if num_tokens == pending:
                    live.prefilling.remove(request)
        return budget - left

    def begin(self, plan: StepPlan, request: Request, budget: int) -> int:
        """The first chunk of a request that has just got its row; how much of the budget it takes,
        which is at least a token."""
        is_alone, num_hit = self._live.is_one, request.num_computed
        fills = self._fill(request, budget, plan.step, is_alone=is_alone)
        left = budget - fills.cost
        num_tokens = self._chunk(request, left, fills, is_alone=is_alone, at_least=1)
        blocks = list(request.kv.blocks)
        plan.scheduled.append(self._compute(request, num_tokens, blocks, fills, num_hit))
        if request.decode.is_prefilling:
            self._live.prefilling.add(request)
        return fills.cost + num_tokens

    def _fill(self, request: Request, budget: int, step: int, *, is_alone: bool) -> Fills:
        """Take the next blocks from the host tier instead of computing them, where it has them."""
        live, start = self._live, request.num_computed
        fills = self._fills.plan(request, budget, step, is_alone=is_alone)
        if not fills.num_tokens:
            return fills
        live.num_queued_tokens -= fills.num_tokens
        live.wheel.advance(request, fills.num_tokens)
        live.notes.registered += self._cache.register(request, start, request.num_computed)
        if not request.place.num_preemptions:
            assert request.place.num_cached is not None
            num_filled = max(0, min(fills.num_tokens, request.num_prompt - start))
            request.place.num_cached += num_filled
            request.place.num_filled += num_filled
        return fills

    def _chunk(
        self, request: Request, most: int, fills: Fills, *, is_alone: bool, at_least: int = 0
    ) -> int:
        if request.spec.is_whole:
            return request.num_known - request.num_computed
        most = min(most, request.num_known - request.num_computed, fills.most_computed)
        if self._threshold and not is_alone:
            most = min(most, self._threshold)
        at_least = max(at_least, min(most, fills.least_computed))
        taken = self._sharing.take(request, self._cache.cut(request, most))
        return ends_outside(request.spec.whole_runs, request.num_computed, max(at_least, taken))

    def _compute(
        self,
        request: Request,
        num_tokens: int,
        new_blocks: list[int],
        fills: Fills,
        num_hit: int = 0,
    ) -> ScheduledRow:
        """num_hit: tokens before all of these that the pool had."""
        live, wheel = self._live, self._live.wheel
        start = request.num_computed
        end = start + num_tokens
        live.num_queued_tokens -= num_tokens
        num_cached = num_hit + fills.num_tokens
        chunk = PlannedChunk(request, num_tokens, num_cached, fills.num_tokens)
        live.notes.prefills.append(chunk)
        wheel.advance(request, num_tokens)
        live.notes.registered += self._cache.register(request, start, end)
        is_last, pools = end == request.num_known, request.spec.pooling is not None
        draws = not (pools or request.spec.computes_only)
        if is_last and request.kv.pins:
            self._cache.images.unpin(request)
        if is_last and not draws:
            wheel.finish(request)
            if not pools:
                live.notes.computed.append(request)
        elif is_last:
            wheel.enter(request)
            if end == request.spec.max_len - 1:
                live.ends.expect_end(request)
        row = ScheduledRow(request.place.row, start, num_tokens, new_blocks, is_last and draws)
        row.new_windowed, row.pools = live.tables.take_new(request), is_last and pools
        row.fills = list(fills.entries)
        self._speculating.follow(request, row)
        return row
