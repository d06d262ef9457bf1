"""Landing: what the result of a step means for the requests that computed in it."""

from collections.abc import Collection, Sequence
from typing import Final, cast

from tokenmesh.engine.core.in_flight import InFlightStep, corrupted_by
from tokenmesh.engine.core.outbox import Outbox
from tokenmesh.engine.core.outputs import (
    EngineTotals,
    add_token_deltas,
    each_draw,
    failure_of,
    token_delta,
)
from tokenmesh.engine.core.rate_meter import RateMeter
from tokenmesh.engine.core.scheduler import Scheduler
from tokenmesh.engine.core.step_log import TimelineStep
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.plan import StepResult
from tokenmesh.engine.request.request import Request, Status
from tokenmesh.engine.request.spec import Ending
from tokenmesh.engine.request.timeline import Chunk
from tokenmesh.shared.clock import now_ns, perf_s

POOLED: Final = Ending("stop")
"""It ends a request with `pooling`, whose numbers are in its output."""
COMPUTED: Final = Ending("stop")
"""It ends a request of which nothing is drawn."""


class Landing:
    """Hands out the tokens of steps that have ended, in their order, and undoes what was lost."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        outbox: Outbox,
        rates: RateMeter,
        totals: EngineTotals,
    ) -> None:
        self._scheduler = scheduler
        self._rows = scheduler.rows
        self._cache = cache
        self._outbox = outbox
        self._rates = rates
        self._totals = totals
        self._ended_s = 0.0
        """When the step before ended; 0: there was none."""

    def land(self, step: InFlightStep, result: StepResult, later: Sequence[InFlightStep]) -> None:
        """Hand out the tokens of a step and end the requests that reached their end.

        later: the steps that were launched on top of it."""
        ended_ns = self._note_end(step, later)
        if result.errors:
            lost: list[tuple[InFlightStep, Collection[int]]] = [(step, result.errors)]
            lost += [(each, ()) for each in later]
            self.drop_rows(lost, result.errors, result.non_retryable)
        self._publish(step, result, ended_ns)

    def drop_rows(
        self,
        lost: list[tuple[InFlightStep, Collection[int]]],
        errors: dict[int, str],
        non_retryable: Collection[int] = (),
    ) -> None:
        """End failed rows; preempt requests that read what these did not write."""
        failed, corrupted = corrupted_by(lost, self._rows, self._cache)
        self._rows.expect_no_late()
        for request in failed:
            row = request.place.row
            failure = failure_of(errors[row], is_retryable=row not in non_retryable)
            self._outbox.close(request, Ending("error", error=failure))
        for request in corrupted:
            self._scheduler.preempt(request)

    def _publish(self, step: InFlightStep, result: StepResult, ended_ns: int) -> None:
        number = step.plan.step
        scheduled = step.plan.scheduled
        starts = {entry.row: entry.start for entry in scheduled} if scheduled else {}
        if result.prompt_logprobs or result.alignments:
            self._note_prompts(number, result, starts)
        owners, ends, ids = self._scheduler.draw(step.plan, result.tokens)
        if result.drafts:
            self._scheduler.note_drafts(number, result.drafts)
        if result.pooled:
            self._publish_pooled(number, result, ended_ns)
        for computed in step.notes.computed:
            if self._rows.owner(computed.place.row, number) is computed:
                computed.timeline.first_token_ns = ended_ns
                self._outbox.end(computed, COMPUTED)
        # a request draws its first token in the step that computes the last of its prompt
        is_special = bool(ends or result.logprobs or starts)
        by_gateway = self._outbox.output.deltas
        if ids is not None and not is_special and None not in owners:
            add_token_deltas(by_gateway, cast("list[Request]", owners), ids)
            return
        for row, request, packed in each_draw(result, owners):
            if request is None:
                continue
            if not request.output.has_reported:
                request.timeline.first_token_ns = ended_ns
            logprobs = result.logprobs.get(row)
            ending = request.ending() if row in ends else None
            delta = token_delta(request, packed, logprobs, ending)
            by_gateway[request.key.gateway].append(delta)
            if ending is not None:
                self._outbox.end(request, ending)

    def _note_prompts(self, step: int, result: StepResult, starts: dict[int, int]) -> None:
        """Note what a step found out about prompts; it is delivered with their first tokens."""
        for row, entries in result.prompt_logprobs.items():
            owner = self._rows.owner(row, step)
            if owner is not None:
                if starts.get(row) == 0:
                    owner.output.prompt_logprobs = []  # computed again after a preemption
                owner.output.prompt_logprobs += entries
        for row, states in result.alignments.items():
            if (owner := self._rows.owner(row, step)) is not None:
                owner.output.alignment = states

    def _publish_pooled(self, step: int, result: StepResult, ended_ns: int) -> None:
        """End the requests whose numbers are there."""
        for row, pooled in result.pooled.items():
            request = self._rows.owner(row, step)
            if request is not None:
                request.timeline.first_token_ns = ended_ns
                request.output.pooled = pooled
                self._outbox.end(request, POOLED)

    def _note_end(self, step: InFlightStep, later: Sequence[InFlightStep]) -> int:
        """Write timelines, step log and rates; when the step ended, wall clock."""
        ended_ns, ended_s = now_ns(), perf_s()
        for each in later:
            each.started_ns, each.started_s = ended_ns, ended_s
        output, batch_size = self._outbox.output, step.plan.num_rows
        for request, num_tokens, num_cached, num_filled in step.notes.prefills:
            # an ended request belongs to the event loop
            if request.place.status is not Status.ENDED:
                between = step.started_ns, ended_ns
                chunk = Chunk(*between, num_tokens, num_cached, num_filled, batch_size)
                request.timeline.chunks.append(chunk)
                if request.decode.is_prefilling and request.spec.reservation:
                    output.prefilling[request.spec.reservation] = request.backlog
        duration_s = output.duration_s = ended_s - step.started_s
        num_tokens = output.num_tokens = step.num_prefill + step.num_decode
        self._totals.prefill_tokens += step.num_prefill
        self._totals.decode_tokens += step.num_decode
        self._rates.note(duration_s, step.num_prefill, step.num_decode)
        speculating = self._scheduler.speculating
        if speculating.is_on and not step.num_prefill:
            # its rows were in the step before: what lies between is a cost of not overlapping
            taken_s = ended_s - (self._ended_s or step.started_s)
            speculating.note_step(step.plan, taken_s)
        self._ended_s = ended_s
        num_used = self._cache.pool.num_used
        self._outbox.log.add(TimelineStep(ended_ns, batch_size, num_tokens, num_used))
        return ended_ns
