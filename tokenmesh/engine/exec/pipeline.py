"""StageRunner: carries out plans in two halves, so that each stage computes another step.

The first half computes a stage's layers and sends hidden states on. The second one takes what the
step drew: on the first stage from the states that the last one sends back, on others from the
leader's frames. Every rank carries out both halves of all steps in one order.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from tokenmesh.engine.exec.compute_thread import Task
from tokenmesh.engine.exec.inputs import StepInputs
from tokenmesh.engine.exec.rows import HostRows, Row
from tokenmesh.engine.exec.runner import StepLogits, TorchRunner
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import StepPlan, StepResult
from tokenmesh.engine.ranks.pipe import Pipe
from tokenmesh.engine.sampling.logprobs import prompt_logprobs
from tokenmesh.engine.sampling.sampler import Drafted, RowSampler

_FIRST: Final = 0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A step whose second half is to come, and the rows as they were."""

    inputs: StepInputs | None
    rows: dict[int, Row]


class StageRunner(TorchRunner):
    """A `TorchRunner` over the layers of one stage."""

    def __init__(
        self,
        model: LanguageModel,
        store: KvStore,
        rows: HostRows,
        sampler: RowSampler,
        *,
        pipe: Pipe,
        **options: Any,
    ) -> None:
        super().__init__(model, store, rows, sampler, **options)
        self.num_lanes = pipe.stages
        self._pipe = pipe
        self._begun: deque[_Begun] = deque()

    @torch.inference_mode()
    def carry_out(self, plan: StepPlan) -> StepResult:
        """The first half; the second one is `finish`."""
        inputs = self.prepare(plan)
        self._fill(plan)
        if inputs is not None:
            self._compute_stage(inputs)
        self._save(plan)
        numbers = [] if inputs is None else inputs.step.numbers
        self._begun.append(_Begun(inputs, {number: self._rows[number] for number in numbers}))
        return StepResult()

    @torch.inference_mode()
    def finish(self) -> StepResult:
        """The second half of the oldest step that has begun."""
        begun = self._begun.popleft()
        if begun.inputs is None:
            return StepResult()
        logits = self._returned(begun.inputs)
        kept = {number for number, row in begun.rows.items() if self._rows.get(number) is row}
        # another step has given rows away: what is drawn there would be another request's
        inputs, logits = _only(kept, begun.inputs, logits)
        return self.sample(inputs, logits)

    def _compute_stage(self, inputs: StepInputs) -> None:
        pipe, model = self._pipe, self._model
        if pipe.is_first:
            hidden = model.embed(inputs.token_ids, inputs.patches)
        else:
            shape = len(inputs.token_ids), model.facts.hidden_size
            hidden = pipe.receive(shape, model.dtype, pipe.stage - 1)
        hidden = model.forward(hidden, inputs.step, self._store)
        if not pipe.is_last:
            pipe.send(hidden, pipe.stage + 1)
        elif inputs.prompt_spans or inputs.sampled_rows:
            # all of them where numbers of prompt tokens are asked
            index = None if inputs.prompt_spans else inputs.last_tokens
            pipe.send(hidden if index is None else hidden.index_select(0, index), _FIRST)

    def _returned(self, inputs: StepInputs) -> StepLogits:
        """Logits of the states that come back. Other stages have none, and draw nothing."""
        pipe, model = self._pipe, self._model
        if not (inputs.prompt_spans or inputs.sampled_rows):
            return StepLogits(sampled=None, prompt={})
        if not pipe.is_first:
            return StepLogits(torch.empty(0, 0) if inputs.sampled_rows else None, prompt={})
        index = inputs.last_tokens
        is_whole = bool(inputs.prompt_spans) or index is None
        count = len(inputs.token_ids) if is_whole or index is None else len(index)
        hidden = pipe.receive((count, model.facts.hidden_size), model.dtype, pipe.stages - 1)
        prompt = {
            span.row: prompt_logprobs(model.logits, hidden[span.tokens], span)
            for span in inputs.prompt_spans
        }
        if not inputs.sampled_rows:
            return StepLogits(None, prompt)
        if is_whole and index is not None:
            hidden = hidden.index_select(0, index)
        return StepLogits(self._logits_of(hidden), prompt)


def _only(kept: set[int], inputs: StepInputs, logits: StepLogits) -> tuple[StepInputs, StepLogits]:
    """A step without the rows that are not `kept`."""
    if kept.issuperset(inputs.step.numbers):
        return inputs, logits
    rows = [number for number in inputs.sampled_rows if number in kept]
    places = [at for at, number in enumerate(inputs.sampled_rows) if number in kept]
    drafted = []
    for each in inputs.drafted:
        if each.row in kept:
            drafted.append(Drafted(each.row, each.token_ids, len(places)))
            places += range(each.first, each.first + len(each.token_ids))
    errors = {number: error for number, error in inputs.errors.items() if number in kept}
    sampled = logits.sampled
    if not rows:
        sampled = None
    elif sampled is not None and len(sampled):
        sampled = sampled.index_select(0, torch.tensor(places))
    inputs = replace(inputs, sampled_rows=rows, drafted=drafted, errors=errors)
    return inputs, replace(logits, sampled=sampled)


class StagedLaunch:
    """A step in two halves; implements `Launch`. The second one is queued once it is waited for:
    until then the first stage computes other steps."""

    def __init__(self, first: Task, second: Callable[[], Task]) -> None:
        self._first, self._start_second = first, second
        self._second: Task | None = None

    def wait(self, timeout_s: float) -> bool:
        return self._asked().wait(timeout_s)

    def result(self) -> StepResult:
        second = self._asked()
        self._first.result()
        return second.result()

    def _asked(self) -> Task:
        if self._second is None:
            self._second = self._start_second()
        return self._second
