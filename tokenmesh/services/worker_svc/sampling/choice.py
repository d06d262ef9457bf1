"""ChoiceState: temperature, the filters, and the draw itself.

What the filters keep is nearly always among the best few hundred tokens, so only those are looked
at first. Rows for which they are not enough are done again over the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels.exponential_noise import exponential_noise, exponential_noise_of
from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.services.worker_svc.sampling.filters import (
    Filters,
    candidate_floors,
    exact_floor,
    has_filter,
)
from tokenmesh.services.worker_svc.sampling.first_max import first_max
from tokenmesh.shared.messages.sampling import SamplingParams

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are 0, as in vLLM."""
CANDIDATES: Final = 256
"""Tokens looked at first when a filter is on."""
TIES: Final = 8
"""Candidates beyond the largest top_k, to see whether its last place is shared."""
PIECE: Final = 1 << 18
"""Elements that are drawn from at a time: a row of a large vocabulary stays in the cache."""


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    position: int
    """Output position of the next token."""
    is_greedy: bool


class ChoiceState:
    """How each row chooses a token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._row_by_number: dict[int, _Row] = {}
        self._num_random = 0

    def add(self, new: NewRow) -> None:
        """Take a row; its next output position follows from what it knows."""
        self.remove(new.row)
        params = new.sampling
        position = len(new.token_ids) - new.num_prompt
        row = _Row(params, position, is_greedy=params.temperature < GREEDY_BELOW)
        self._row_by_number[new.row] = row
        self._num_random += not row.is_greedy

    def remove(self, number: int) -> None:
        """Forget a row."""
        row = self._row_by_number.pop(number, None)
        if row is not None:
            self._num_random -= not row.is_greedy

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes its largest logit."""
        return not self._num_random

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        self._row_by_number[number].position += 1

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """logits [N, V] -> [N] token ids. Rows without any possible token get an arbitrary one."""
        if self.is_greedy:
            return first_max(logits)
        rows = [self._row_by_number[number] for number in numbers]
        tokens = torch.empty(len(rows), dtype=torch.int64)
        greedy = [i for i, row in enumerate(rows) if row.is_greedy]
        if greedy:
            tokens[greedy] = first_max(logits[greedy])
        random = [i for i, row in enumerate(rows) if not row.is_greedy]
        at_once = max(1, PIECE // self._vocab_size)
        for is_filtered in (False, True):
            chosen = [i for i in random if has_filter(rows[i].params) == is_filtered]
            draw = self._draw_filtered if is_filtered else self._draw_plain
            for first in range(0, len(chosen), at_once):
                piece = chosen[first : first + at_once]
                tokens[piece] = draw(logits[piece], [rows[i] for i in piece])
        return tokens

    def _draw_plain(self, logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        weights = _tempered(logits, rows)
        weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        return first_max(weights.div_(exponential_noise(*_keys(rows), self._vocab_size)))

    def _draw_filtered(self, logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        largest = max(row.params.top_k for row in rows)
        count = min(self._vocab_size, max(CANDIDATES, largest + TIES))
        scaled = _tempered(logits, rows)
        values, ids = scaled.topk(count, dim=-1)
        best = values[:, :1]
        weights = (values - best).exp()
        totals = torch.zeros(len(rows), 1, dtype=torch.float64)
        for i, row in enumerate(rows):
            has_top_k = 0 < row.params.top_k < self._vocab_size
            if not has_top_k and row.params.min_p == 0.0:
                totals[i] = (scaled[i] - best[i]).exp_().sum()
        floors, is_right = candidate_floors(
            weights, totals, Filters.of([row.params for row in rows])
        )
        weights.mul_(weights >= floors).div_(exponential_noise_of(*_keys(rows), ids))
        tokens = ids.gather(1, weights.argmax(-1, keepdim=True)).squeeze(1)
        if count < self._vocab_size:
            for i in (~is_right).nonzero().flatten().tolist():
                one = slice(i, i + 1)
                tokens[one] = self._draw_from_all(scaled[one] - best[one], rows[i])
        return tokens

    def _draw_from_all(self, scaled: torch.Tensor, row: _Row) -> torch.Tensor:
        """scaled [1, V], the best 0 -> [1] token id."""
        weights = scaled.exp_()
        weights.mul_(weights >= exact_floor(weights[0], row.params))
        return first_max(weights.div_(exponential_noise(*_keys([row]), self._vocab_size)))


def _tempered(logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    temperature = torch.tensor([row.params.temperature for row in rows]).unsqueeze(1)
    return logits / temperature


def _keys(rows: Sequence[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and output positions, int64 [N]."""
    seeds = torch.tensor([signed64(row.params.seed) for row in rows])
    return seeds, torch.tensor([row.position for row in rows])


def signed64(seed: int) -> int:
    """The signed number with the last 64 bits of a seed."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
