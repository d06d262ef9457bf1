"""Admission: waiting requests get rows."""

from tokenmesh.engine.plan import NewRow, StepPlan
from tokenmesh.engine.request.request import Request


def new_row_of(request: Request) -> NewRow:
    """What the runner needs to know of a request that was given a row."""
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


def fits_step(request: Request, budget: int, plan: StepPlan) -> bool:
    """Whether the step has room for it. A prompt that cannot be cut may exceed the budget alone."""
    return not request.spec.is_whole or request.num_known <= budget or not plan.num_rows
