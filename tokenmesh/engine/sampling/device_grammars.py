"""DeviceGrammars: grammars of rows on a device, which the host follows one step behind it.

What a row may draw is known once its previous token is. A step with such a row therefore waits for
the step before it between forward pass and draw; other steps do not wait.
"""

from collections.abc import Sequence

import torch

from tokenmesh.engine.layers.upload import upload
from tokenmesh.engine.plan import NewRow, StepResult
from tokenmesh.engine.sampling.grammars import GrammarState, StepGrammars
from tokenmesh.kernels.grammar_mask import grammar_mask
from tokenmesh.kernels.sample import HID_DEFECT, HID_NUMBER


class DeviceStepGrammars:
    """The grammars of one batch: sends masks to the device, follows the tokens it returns."""

    def __init__(self, step: StepGrammars, numbers: Sequence[int]) -> None:
        self._step = step
        self._numbers = list(numbers)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change logits [N, V] in place; the tokens drawn so far must have been noted.

        Returns marks int32 [N] for `sample`: whether something was hidden, and of what kind.
        """
        marks = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        indices, masks = self._step.fill()
        if not indices:
            return marks
        rows = upload(torch.tensor(indices, dtype=torch.int32), logits.device)
        is_sound = logits.amax(-1).isfinite()
        grammar_mask(logits, rows, upload(torch.from_numpy(masks), logits.device))
        # torch.where would wait for the device to read the numbers
        kinds = torch.full_like(marks, HID_DEFECT).masked_fill_(is_sound, HID_NUMBER)
        marks[rows.long()] = kinds[rows.long()]
        return marks

    def note(self, result: StepResult) -> None:
        """Follow the tokens of the step's result, and move rows that failed to its errors."""
        for index, number in enumerate(self._numbers):
            if number in result.tokens and index not in self._step.errors:
                for token_id in result.tokens[number]:
                    self._step.append(index, token_id)
        failed = {self._numbers[index]: error for index, error in self._step.errors.items()}
        if failed:
            for number in failed:
                result.tokens.pop(number, None)
                result.logprobs.pop(number, None)
            result.errors = failed | result.errors
            result.non_retryable |= failed.keys()


class DeviceGrammars:
    """The rows that have a grammar."""

    def __init__(self, vocab_size: int, eos_ids: frozenset[int], step_s: float) -> None:
        self._state = GrammarState(vocab_size, eos_ids, step_s)

    def add(self, new: NewRow) -> None:
        """Take a row, when it has a grammar."""
        self._state.add(new)

    def remove(self, number: int) -> None:
        """Forget a row; a step in flight still knows it."""
        self._state.remove(number)

    def apply(self) -> None:
        """Nothing is staged: grammars are kept on the host."""

    def of(self, numbers: Sequence[int]) -> DeviceStepGrammars | None:
        """For a batch of these rows; None when none of them has a grammar."""
        if not any(number in self._state for number in numbers):
            return None
        return DeviceStepGrammars(self._state.of(numbers), numbers)
