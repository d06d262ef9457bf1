"""PenaltyState: repetition over prompt and output, presence and frequency over the output."""

from collections import Counter
from collections.abc import Sequence

import torch

from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.plan import NewRow


def has_penalty(params: SamplingParams) -> bool:
    """Return whether any of the three does anything."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


class _Row:
    """The distinct tokens of one request and how often each was generated."""

    def __init__(self, new: NewRow, vocab_size: int) -> None:
        self.params: SamplingParams = new.sampling
        counts = Counter(new.token_ids[new.num_prompt :])
        repeats = self.params.repetition_penalty != 1.0
        prompt = set(new.token_ids[: new.num_prompt]) - counts.keys() if repeats else ()
        ids = [token for token in (*counts, *prompt) if token < vocab_size]
        self._index_by_token = {token: index for index, token in enumerate(ids)}
        self._size = len(ids)
        self._ids = torch.tensor(ids, dtype=torch.int64)
        self._counts = torch.tensor([float(counts[token]) for token in ids])

    def append(self, token_id: int) -> None:
        index = self._index_by_token.get(token_id)
        if index is None:
            index = self._index_by_token[token_id] = self._size
            self._size += 1
            if self._size > len(self._ids):
                self._ids = torch.cat([self._ids, torch.zeros(self._size, dtype=torch.int64)])
                self._counts = torch.cat([self._counts, torch.zeros(self._size)])
            self._ids[index] = token_id
        self._counts[index] += 1

    def change(self, logits: torch.Tensor) -> None:
        params = self.params
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        values = logits[ids]
        repetition = params.repetition_penalty
        if repetition != 1.0:
            values = torch.where(values > 0, values / repetition, values * repetition)
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits[ids] = values


class PenaltyState:
    """Penalties of the rows that have any."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._row_by_number: dict[int, _Row] = {}

    def add(self, new: NewRow) -> None:
        """Take a row, counting what it has generated before."""
        if has_penalty(new.sampling):
            self._row_by_number[new.row] = _Row(new, self._vocab_size)

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
            row.append(token_id)

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> None:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to."""
        if not self._row_by_number:
            return
        for index, number in enumerate(numbers):
            row = self._row_by_number.get(number)
            if row is not None:
                row.change(logits[index])
