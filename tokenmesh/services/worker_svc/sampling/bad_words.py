"""BadWordState: the last token of a banned sequence is banned once the others were generated."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.services.worker_svc.engine.plan import NewRow


@dataclass(slots=True)
class _Row:
    words: list[list[int]]
    output: list[int]
    """What was generated so far; a prompt never starts a banned sequence."""

    def banned(self) -> list[int]:
        """Tokens that would complete a banned sequence now."""
        return [
            word[-1]
            for word in self.words
            if len(word) == 1 or self.output[-(len(word) - 1) :] == word[:-1]
        ]


class BadWordState:
    """Banned sequences of the rows that have any."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._row_by_number: dict[int, _Row] = {}

    def add(self, new: NewRow) -> None:
        """Take a row with what it has generated before."""
        words = [
            word for word in new.sampling.bad_words_ids if word and word[-1] < self._vocab_size
        ]
        if words:
            self._row_by_number[new.row] = _Row(words, new.token_ids[new.num_prompt :])

    def remove(self, number: int) -> None:
        """Forget a row."""
        self._row_by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._row_by_number)

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        row = self._row_by_number.get(number)
        if row is not None:
            row.output.append(token_id)

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> None:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to."""
        if not self._row_by_number:
            return
        for index, number in enumerate(numbers):
            row = self._row_by_number.get(number)
            banned = row.banned() if row is not None else []
            if banned:
                logits[index, torch.tensor(banned)] = float("-inf")
