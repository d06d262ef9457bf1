"""Admission: waiting requests get rows, in their order, while there are rows, blocks and budget."""

from tokenmesh.engine.core.live_requests import LiveRequests
from tokenmesh.engine.core.prefill import Prefill
from tokenmesh.engine.plan import NewRow, StepPlan
from tokenmesh.engine.request.request import Request


class RowAdmission:
    """Nothing overtakes the first one that waits: where it has no room, no other gets a row."""

    def __init__(self, live: LiveRequests, prefill: Prefill) -> None:
        self._live = live
        self._prefill = prefill

    def admit(self, plan: StepPlan, budget: int) -> None:
        """Give rows, and plan the first chunks of their requests with what is left of the step."""
        live = self._live
        while budget > 0 and live.rows.has_free and len(live.waiting) and live.has_room_in_lane:
            request = live.waiting.first
            hits = live.find(request)
            if hits is None or not _fits_step(request, budget, plan):
                break
            live.place(request, hits, plan.step)
            plan.new_rows.append(new_row_of(request))
            budget -= self._prefill.begin(plan, request, budget)


def _fits_step(request: Request, budget: int, plan: StepPlan) -> bool:
    """Return whether the step has room for it.

    A prompt that cannot be cut may exceed the budget alone.
    """
    return not request.spec.is_whole or request.num_known <= budget or not plan.num_rows


def new_row_of(request: Request) -> NewRow:
    """Describe a request that was given a row to the runner."""
    return NewRow(
        row=request.place.row,
        token_ids=list(request.token_ids),
        num_prompt=request.num_prompt,
        sampling=request.spec.sampling,
        media=request.spec.media,
        wants_prompt_logprobs=request.output.wants_prompt_logprobs,
        embeddings=request.prepared.embeddings,
        grammar=request.prepared.grammar,
        state=request.kv.began_with.slot if request.kv.began_with is not None else None,
        pooling=request.spec.pooling,
        type_ids=request.spec.type_ids,
        adapter=request.prepared.adapter,
    )
