"""ChoiceState: temperature, min_p, top_k and top_p, and the draw itself.

A filter keeps a prefix of the sorted vocabulary, so the best few hundred tokens are nearly always
all that has to be looked at. Rows for which they are not are done again over the whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tokenmesh.kernels.exponential_noise import exponential_noise
from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.shared.messages.sampling import SamplingParams

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are 0, as in vLLM."""
CANDIDATES: Final = 256
"""Tokens looked at first when a filter is on."""
TIES: Final = 8
"""Candidates beyond the largest top_k, to see whether its last place is shared."""


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    position: int
    """Output position of the next token."""

    @property
    def has_filter(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


class ChoiceState:
    """How each row chooses a token."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32)
        self._row_by_number: dict[int, _Row] = {}
        self._num_random = 0

    def add(self, new: NewRow) -> None:
        """Take a row; its next output position follows from what it knows."""
        self.remove(new.row)
        row = _Row(new.sampling, len(new.token_ids) - new.num_prompt)
        self._row_by_number[new.row] = row
        self._num_random += not _is_greedy(row)

    def remove(self, number: int) -> None:
        """Forget a row."""
        row = self._row_by_number.pop(number, None)
        if row is not None:
            self._num_random -= not _is_greedy(row)

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        self._row_by_number[number].position += 1

    def apply(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """logits [N, V] -> [N] token ids. Rows without any possible token get an arbitrary one."""
        if not self._num_random:
            return logits.argmax(-1)
        rows = [self._row_by_number[number] for number in numbers]
        tokens = torch.empty(len(rows), dtype=torch.int64)
        greedy = [i for i, row in enumerate(rows) if _is_greedy(row)]
        plain = [i for i, row in enumerate(rows) if not _is_greedy(row) and not row.has_filter]
        filtered = [i for i, row in enumerate(rows) if not _is_greedy(row) and row.has_filter]
        if greedy:
            tokens[greedy] = logits[greedy].argmax(-1)
        if plain:
            tokens[plain] = self._draw_plain(logits[plain], [rows[i] for i in plain])
        if filtered:
            tokens[filtered] = self._draw_filtered(logits[filtered], [rows[i] for i in filtered])
        return tokens

    def _draw_plain(self, logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        scaled = _tempered(logits, rows)
        scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()
        return scaled.div_(_noise(rows, self._token_ids)).argmax(-1)

    def _draw_filtered(self, logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
        largest = max(row.params.top_k for row in rows)
        count = min(self._vocab_size, max(CANDIDATES, largest + TIES))
        scaled = _tempered(logits, rows)
        tokens, is_complete = self._draw_among(scaled, rows, count)
        missing = [i for i, complete in enumerate(is_complete.tolist()) if not complete]
        if missing:
            again = [rows[i] for i in missing]
            tokens[missing] = self._draw_among(scaled[missing], again, self._vocab_size)[0]
        return tokens

    def _draw_among(
        self, scaled: torch.Tensor, rows: Sequence[_Row], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [N], and whether `count` candidates were enough to know them."""
        values, ids = scaled.topk(count, dim=-1)
        kept, is_complete = kept_candidates(scaled, values, [row.params for row in rows])
        weights = (values - values[:, :1]).exp_().mul_(kept)
        best = weights.div_(_noise(rows, ids.int())).argmax(-1, keepdim=True)
        return ids.gather(1, best).squeeze(1), is_complete


def kept_candidates(
    scaled: torch.Tensor, values: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the candidates values [N, K], sorted, survive min_p, top_k and top_p, in this order.

    Returns kept [N, K] and whether each row's answer is exact [N]: it is not when a filter may also
    keep tokens beyond the candidates. Tokens that tie with the last of top_k are all kept.
    """
    count, vocab_size = values.shape[1], scaled.shape[1]
    min_p = torch.tensor([p.min_p for p in params]).unsqueeze(1)
    floor = values[:, :1] + min_p.log()
    last = torch.tensor([(p.top_k if 0 < p.top_k <= count else count) - 1 for p in params])
    kth = values.gather(1, last.unsqueeze(1))
    has_top_k = torch.tensor([0 < p.top_k <= count for p in params]).unsqueeze(1)
    floor = torch.where(has_top_k, torch.maximum(floor, kth), floor)
    kept = values >= floor
    is_cut = has_top_k.squeeze(1) | (min_p.squeeze(1) > 0)

    top_p = torch.tensor([p.top_p for p in params]).unsqueeze(1)
    probabilities = (values - values[:, :1]).exp_().mul_(kept)
    total = probabilities.sum(-1, keepdim=True)
    if count < vocab_size and not bool(is_cut.all()):
        everything = (scaled.logsumexp(-1, keepdim=True) - values[:, :1]).exp_()
        total = torch.where(is_cut.unsqueeze(1), total, everything)
    before = probabilities.cumsum(-1) - probabilities
    within = (before < top_p * total) | (top_p >= 1.0)
    within[:, 0] = True
    is_filled = torch.where(is_cut, kept[:, -1], (kept & within)[:, -1])
    return kept & within, ~is_filled | (count == vocab_size)


def _is_greedy(row: _Row) -> bool:
    return row.params.temperature < GREEDY_BELOW


def _tempered(logits: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    temperature = torch.tensor([row.params.temperature for row in rows]).unsqueeze(1)
    return logits / temperature


def _noise(rows: Sequence[_Row], token_ids: torch.Tensor) -> torch.Tensor:
    """token_ids [n] or [N, n] int32 -> [N, n]."""
    seeds = torch.tensor([_signed64(row.params.seed) for row in rows])
    positions = torch.tensor([row.position for row in rows])
    return exponential_noise(seeds, positions, token_ids)


def _signed64(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
