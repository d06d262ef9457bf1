"""Rules of whisper's transcripts: suppressed tokens, and timestamps that make sense.

Timestamps come in pairs, the end of a segment and the beginning of the next one, except at the
beginning and the end of a transcript, and they never go back. Where all timestamps together are
more likely than any text, one of them is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.engine.api.sampling import SpeechRule
from tokenmesh.engine.plan import NewRow

_NEVER: Final = float("-inf")


@dataclass(slots=True)
class _SpeechRow:
    rule: SpeechRule
    suppressed: torch.Tensor
    suppressed_first: torch.Tensor
    output: list[int]
    """It holds what was generated so far."""

    def apply(self, logits: torch.Tensor) -> None:
        logits[self.suppressed] = _NEVER
        if not self.output:
            logits[self.suppressed_first] = _NEVER
        if self.rule.first_timestamp_id >= 0:
            self._mask(logits)

    def _mask(self, logits: torch.Tensor) -> None:
        rule, first, output = self.rule, self.rule.first_timestamp_id, self.output
        logits[rule.no_timestamps_id] = _NEVER
        is_after = bool(output) and output[-1] >= first
        is_second = len(output) < 2 or output[-2] >= first
        if is_after and is_second:
            logits[first:] = _NEVER
        elif is_after:
            logits[: rule.end_id] = _NEVER
        latest = max((token for token in reversed(output) if token >= first), default=None)
        if latest is not None:
            may_repeat = is_after and not is_second
            logits[first : latest if may_repeat else latest + 1] = _NEVER
        if not output:
            logits[:first] = _NEVER
            if rule.max_initial_timestamp >= 0:
                logits[first + rule.max_initial_timestamp + 1 :] = _NEVER
        values = logits.float()
        if values[first:].logsumexp(-1) > values[:first].max():
            logits[:first] = _NEVER


class SpeechState:
    """The rows that transcribe."""

    def __init__(self) -> None:
        self._row_by_number: dict[int, _SpeechRow] = {}

    def add(self, new: NewRow) -> None:
        """Take a row with what it has generated before."""
        rule = new.sampling.speech
        if rule is None:
            return
        self._row_by_number[new.row] = _SpeechRow(
            rule,
            torch.tensor(rule.suppress_ids, dtype=torch.int64),
            torch.tensor(rule.begin_suppress_ids, dtype=torch.int64),
            new.token_ids[new.num_prompt :],
        )

    def remove(self, number: int) -> None:
        self._row_by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._row_by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._row_by_number

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        row = self._row_by_number.get(number)
        if row is not None:
            row.output.append(token_id)

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> None:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to."""
        for index, number in enumerate(numbers if self._row_by_number else ()):
            row = self._row_by_number.get(number)
            if row is not None:
                row.apply(logits[index])
