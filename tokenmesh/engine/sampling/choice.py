"""ChoiceState: temperature, the filters min_p, top_k and top_p, and the draw itself.

The tokens that filters keep are nearly always among the best few hundred, so only those are tried
first. Rows for which they do not suffice are drawn again over the whole vocabulary.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.plan import NewRow
from tokenmesh.kernels.exponential_noise import exponential_noise, exponential_noise_of
from tokenmesh.kernels.rejection import rejection

_BITS_OF_ONE: Final = 0x3F800000
"""1.0 as float32; up to it, positive floats sort like their bits."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The three parameters of N rows."""

    min_p: torch.Tensor
    """float32 [N, 1]"""
    top_p: torch.Tensor
    """float64 [N, 1]"""
    top_k: torch.Tensor
    """int64 [N, 1]; 0 keeps everything."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Filters":
        return cls(
            min_p=torch.tensor([p.min_p for p in params]).unsqueeze(1),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(1),
            top_k=torch.tensor([p.top_k for p in params]).unsqueeze(1),
        )


def has_filter(params: SamplingParams) -> bool:
    """Return whether any of the three does anything."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def candidate_floors(
    weights: torch.Tensor, totals: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The floor of each row [N, 1] from its best K weights [N, K], sorted.

    totals [N, 1] are sums over the whole vocabulary, needed where neither min_p nor top_k is set.
    Also returns which rows [N] are left with tokens among the K only, so that their floor is right.
    """
    count = weights.shape[1]
    has_top_k = (filters.top_k > 0) & (filters.top_k < count)
    kth = weights.gather(1, filters.top_k.clamp(1, count) - 1)
    limit = torch.where(has_top_k, torch.maximum(filters.min_p, kth), filters.min_p)
    kept = weights * (weights >= limit)
    # sums of a prefix are the same whatever K is
    sums = kept.double().cumsum(-1)
    # a top_k beyond the tokens that are possible at all has limit 0, and they are all here
    totals = torch.where(has_top_k | (limit > 0), sums[:, -1:], totals)
    num_within = ((sums - kept) < filters.top_p * totals).sum(-1, keepdim=True).clamp_(min=1)
    nucleus = weights.gather(1, num_within - 1)
    floor = torch.where(filters.top_p < 1.0, torch.maximum(limit, nucleus), limit)
    # a limit inside the candidates makes their sum the total; without one, the floor must be inside
    is_right = weights[:, -1:] < torch.where(limit > 0, limit, floor)
    return floor, is_right.squeeze(1)


def exact_floor(weights: torch.Tensor, params: SamplingParams) -> float:
    """The floor of one row from all its weights [V], without sorting them.

    top_p: the smallest float t so that less than top_p of the mass lies above it, by bisection over
    the bits of t; a sort of a large vocabulary takes ten times as long.
    """
    limit = params.min_p
    if 0 < params.top_k < len(weights):
        limit = max(limit, float(weights.topk(params.top_k).values[-1]))
    if params.top_p >= 1.0:
        return limit
    kept = weights * (weights >= limit)
    target = params.top_p * float(kept.sum())
    low, high = -1, _BITS_OF_ONE
    while high - low > 1:
        middle = (low + high) // 2
        above = float(torch.nn.functional.threshold(kept, _float_of(middle), 0.0).sum())
        low, high = (low, middle) if above < target else (middle, high)
    return max(limit, _float_of(high))


def _float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])


GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are 0, as in vLLM."""
CANDIDATES: Final = 256
"""Best tokens that are tried first when a filter is on."""
TIES: Final = 8
"""Candidates beyond the largest top_k, which show whether its last place is tied."""
PIECE: Final = 1 << 18
"""Elements drawn from at a time, so that a row of a large vocabulary stays in the cache."""


_APART: Final = 0x9B05688C2B3E6C1F
"""The seed of drafts that are drawn apart differs by these bits."""


class Judged(NamedTuple):
    """A draft that was drawn apart."""

    token_id: int
    probs: torch.Tensor
    """[V], with which it was drawn."""


@dataclass(slots=True)
class _Row:
    params: SamplingParams
    position: int
    """Output position of the next token."""
    is_greedy: bool

    def ahead(self, places: int) -> "_Row":
        """The same row, so many tokens later."""
        return _Row(self.params, self.position + places, self.is_greedy) if places else self


class ChoiceState:
    """It says how each row chooses a token."""

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
        row = self._row_by_number.pop(number, None)
        if row is not None:
            self._num_random -= not row.is_greedy

    @property
    def is_greedy(self) -> bool:
        """Return whether every row takes its largest logit."""
        return not self._num_random

    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""
        self._row_by_number[number].position += 1

    def apply(
        self, logits: torch.Tensor, numbers: Sequence[int], ahead: Sequence[int]
    ) -> torch.Tensor:
        """logits [N, V] -> [N] token ids. Rows without any possible token get an arbitrary one.

        `ahead`: by how many tokens each is behind the next one of its row.
        """
        if self.is_greedy:
            return first_max(logits)
        rows = [
            self._row_by_number[number].ahead(places)
            for number, places in zip(numbers, ahead, strict=True)
        ]
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

    def kept(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """logits [N, V] as tokens are drawn from them: tempered, -inf where a filter drops them."""
        rows = [self._row_by_number[number] for number in numbers]
        kept = logits.clone()
        for i, row in enumerate(rows):
            if row.is_greedy:
                continue
            scaled = logits[i] / row.params.temperature
            if has_filter(row.params):
                weights = (scaled - scaled.max()).exp()
                scaled[weights < exact_floor(weights, row.params)] = -torch.inf
            kept[i] = scaled
        return kept

    def probabilities(self, logits: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """Return those [N, V] that tokens of rows that are not greedy are drawn with."""
        return self.kept(logits, numbers).softmax(-1)

    def draw_apart(
        self, logits: torch.Tensor, numbers: Sequence[int], ahead: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Draw as `apply` does, but with a noise that has nothing in common with a row's own.

        Returns tokens [N], and of rows that are not greedy the probabilities [V].
        """
        tokens = first_max(logits)
        random = [
            i for i, number in enumerate(numbers) if not self._row_by_number[number].is_greedy
        ]
        probs: list[torch.Tensor | None] = [None] * len(numbers)
        if random:
            found = self.probabilities(logits[random], [numbers[i] for i in random])
            seeds, positions = self._keys_of([(numbers[i], ahead[i]) for i in random])
            noise = exponential_noise(seeds ^ signed64(_APART), positions, self._vocab_size)
            tokens[random] = first_max(found / noise)
            for i, row in zip(random, found, strict=True):
                probs[i] = row
        return tokens, probs

    def judge(
        self, logits: torch.Tensor, places: Sequence[tuple[int, int]], judged: Sequence[Judged]
    ) -> torch.Tensor:
        """Draw in the places of drafts that were drawn apart, see `rejection`: for each its logits,
        its row, by how many tokens it is behind the next one, and the draft."""
        target = self.probabilities(logits, [number for number, _ in places])
        draft = torch.stack([each.probs for each in judged])
        ids = torch.tensor([each.token_id for each in judged])
        return rejection(target, draft, ids, *self._keys_of(places))

    def _keys_of(self, places: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return _keys([self._row_by_number[number].ahead(ahead) for number, ahead in places])

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


def first_max(values: torch.Tensor) -> torch.Tensor:
    """values [N, V] without NaN -> [N] int64 index of the first largest."""
    return torch.from_numpy(values.numpy().argmax(-1))
