"""Rules about single tokens: allowed_token_ids, logit_bias, min_tokens and bad words."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.engine.plan import NewRow


@dataclass(slots=True)
class _BannedRow:
    words: list[list[int]]
    output: list[int]
    """It holds what was generated so far; a prompt never starts a banned sequence."""

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
        self._row_by_number: dict[int, _BannedRow] = {}

    def add(self, new: NewRow) -> None:
        """Take a row with what it has generated before."""
        words = [
            word for word in new.sampling.bad_words_ids if word and word[-1] < self._vocab_size
        ]
        if words:
            self._row_by_number[new.row] = _BannedRow(words, new.token_ids[new.num_prompt :])

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
        if not self._row_by_number:
            return
        for index, number in enumerate(numbers):
            row = self._row_by_number.get(number)
            banned = row.banned() if row is not None else []
            if banned:
                logits[index, torch.tensor(banned)] = float("-inf")


@dataclass(slots=True)
class _Row:
    allowed: torch.Tensor | None
    biased: torch.Tensor | None
    bias: torch.Tensor
    stops: torch.Tensor
    """Tokens that may not be drawn while the output is short."""
    num_missing: int
    """Output tokens until min_tokens is reached."""


class VocabularyState:
    """It says which tokens a row may draw, and by how much single tokens are favored."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._row_by_number: dict[int, _Row] = {}

    def add(self, new: NewRow) -> None:
        """Take a row, when it needs any of this. Ids outside the vocabulary have no effect."""
        params = new.sampling
        num_missing = params.min_tokens - (len(new.token_ids) - new.num_prompt)
        if params.allowed_token_ids is None and not params.logit_bias and num_missing <= 0:
            return
        # also with ignore_eos, as in vLLM
        stops = {*params.stop_token_ids, *self._eos_token_ids}
        allowed, biased = params.allowed_token_ids, self._known(list(params.logit_bias))
        self._row_by_number[new.row] = _Row(
            allowed=None if allowed is None else torch.tensor(self._known(allowed)).long(),
            biased=torch.tensor(biased) if biased else None,
            bias=torch.tensor([params.logit_bias[token] for token in biased]),
            stops=torch.tensor(self._known(sorted(stops))).long(),
            num_missing=num_missing,
        )

    def remove(self, number: int) -> None:
        self._row_by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._row_by_number)

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        row = self._row_by_number.get(number)
        if row is not None:
            row.num_missing -= 1

    def apply(self, logits: torch.Tensor, numbers: Sequence[int], ahead: Sequence[int]) -> None:
        """Change logits [N, V] in place; numbers [N] are the rows they belong to, `ahead` how many
        tokens they are behind the next one of the row."""
        if not self._row_by_number:
            return
        for index, number in enumerate(numbers):
            row = self._row_by_number.get(number)
            if row is not None:
                _change(logits[index], row, row.num_missing - ahead[index])

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if 0 <= token < self._vocab_size]


def _change(logits: torch.Tensor, row: _Row, num_missing: int) -> None:
    if row.allowed is not None:
        kept = logits[row.allowed]
        logits.fill_(float("-inf"))
        logits[row.allowed] = kept
    if row.biased is not None:
        logits[row.biased] += row.bias
    if num_missing > 0:
        logits[row.stops] = float("-inf")
