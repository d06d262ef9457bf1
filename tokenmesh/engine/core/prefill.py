"""Prefill: known tokens that are not computed yet, a chunk of them at a time."""

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

    def go_on(self, plan: StepPlan, budget: int) -> int:
        """The next chunks of prompts, as far as there is budget; how much of it they take."""
        live = self._live
        is_alone = live.is_one
        left = budget
        for request in list(live.prefilling):
            if left <= 0:
                break
            pending = len(request.token_ids) - request.num_computed
            num_tokens = self._chunk(request, left, is_alone=is_alone)
            if num_tokens:  # else the tenant's share of the step is used up
                plan.scheduled.append(self._compute(request, num_tokens, []))
                left -= num_tokens
                if num_tokens == pending:
                    live.prefilling.remove(request)
        return budget - left

    def begin(self, plan: StepPlan, request: Request, budget: int) -> int:
        """The first chunk of a request that has just got its row; how much of the budget it takes,
        which is at least a token."""
        num_tokens = self._chunk(request, budget, is_alone=self._live.is_one, at_least=1)
        blocks, num_cached = list(request.kv.blocks), request.num_computed
        plan.scheduled.append(self._compute(request, num_tokens, blocks, num_cached))
        if request.decode.is_prefilling:
            self._live.prefilling.add(request)
        return num_tokens

    def _chunk(self, request: Request, most: int, *, is_alone: bool, at_least: int = 0) -> int:
        if request.spec.is_whole:
            return request.num_known - request.num_computed
        most = min(most, request.num_known - request.num_computed)
        if self._threshold and not is_alone:
            most = min(most, self._threshold)
        taken = self._sharing.take(request, self._cache.cut(request, most))
        return ends_outside(request.spec.whole_runs, request.num_computed, max(at_least, taken))

    def _compute(
        self, request: Request, num_tokens: int, new_blocks: list[int], num_cached: int = 0
    ) -> ScheduledRow:
        live, wheel = self._live, self._live.wheel
        start = request.num_computed
        end = start + num_tokens
        live.num_queued_tokens -= num_tokens
        live.notes.prefills.append((request, num_tokens, num_cached))
        wheel.advance(request, num_tokens)
        live.notes.registered += self._cache.register(request, start, end)
        is_last, pools = end == request.num_known, request.spec.pooling is not None
        if is_last and pools:
            wheel.finish(request)
        elif is_last:
            wheel.enter(request)
            if end == request.spec.max_len - 1:
                live.ends.expect_end(request)
        row = ScheduledRow(request.place.row, start, num_tokens, new_blocks, is_last and not pools)
        row.new_windowed, row.pools = live.tables.take_new(request), is_last and pools
        row.num_proposed = self._speculating.num_proposed if row.samples else 0
        return row
