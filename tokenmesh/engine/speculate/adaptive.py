"""Adaptive numbers of drafts: as many as give the most tokens a second, by what was measured.

A step computes one token of each row and its drafts. `Acceptance` knows how likely each draft is to
be right, `StepCost` how much longer a step takes with drafts, and `choose` weighs the two.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Final

from tokenmesh.engine.speculate.indexed_text import Match

MIN_GAIN: Final = 1.02
"""Drafts must promise this much more tokens a second: estimates are not exact."""
_PRIOR: Final = (0.2, 0.35, 0.6, 0.8, 0.9)
"""A draft is so likely to be right before any was seen, by the bits of the match's length."""
_PRIOR_WEIGHT: Final = 4
_KEPT_BY_ALL: Final = 256
"""Drafts that a mean over all rows remembers."""
_KEPT_BY_ROW: Final = 12
_KEPT_STEPS: Final = 16
_STALE_STEPS: Final = 2000
"""A cost that was not measured for so long is not known any more; of fewer than `_KEPT_STEPS` steps
after as much less."""
_MIN_PLAIN_STEPS: Final = 2
_MOST_DRAFTED: Final = 128
"""After so many steps with drafts one without is measured again: contexts have grown."""
_MOST_OF_MEAN: Final = 2.0
"""A step that takes longer than so many times what was expected was disturbed."""
_PRIOR_COST: Final = 0.1
"""One more token in a step with one costs this share of its time."""


class Rates:
    """By strength of a match and place of a draft: how often it was right, given that those before
    it were."""

    def __init__(self, kept: int, prior: "Rates | None" = None) -> None:
        self._kept = kept
        self._prior = prior
        self._means: list[list[float]] = [[] for _ in _PRIOR]
        self._weights: list[list[float]] = [[] for _ in _PRIOR]

    def at(self, strength: int, place: int) -> float:
        """The rate; beyond the places that were seen that of the last one."""
        means = self._means[strength]
        if means:
            return means[min(place, len(means) - 1)]
        return _PRIOR[strength] if self._prior is None else self._prior.at(strength, place)

    def first(self, strength: int, count: int) -> list[float]:
        """The rates of so many places, from the first one on."""
        means = self._means[strength]
        if means:
            return means[:count] + means[-1:] * (count - len(means))
        if self._prior is None:
            return [_PRIOR[strength]] * count
        return self._prior.first(strength, count)

    def note(self, strength: int, num_right: int, *, ended_wrong: bool) -> None:
        """So many drafts were right; `ended_wrong`: and the next one was not."""
        means, weights, kept = self._means[strength], self._weights[strength], self._kept
        for place in range(num_right + ended_wrong):
            if place == len(means):
                means.append(self._begun(strength, place))
                weights.append(_PRIOR_WEIGHT)
            weight = weights[place]
            if weight < kept:
                weights[place] = weight = weight + 1
            mean = means[place]
            means[place] = mean + ((place < num_right) - mean) / weight

    def _begun(self, strength: int, place: int) -> float:
        if self._prior is not None:
            return self._prior.at(strength, place)
        return self.at(strength, place - 1) if place else _PRIOR[strength]


class Acceptance:
    """Rates of all rows together, with which those of a new row begin."""

    def __init__(self) -> None:
        self._all = Rates(_KEPT_BY_ALL)

    def of_row(self) -> Rates:
        """Those of a new row."""
        return Rates(_KEPT_BY_ROW, self._all)

    def note(self, row: Rates, strength: int, num_right: int, *, ended_wrong: bool) -> None:
        row.note(strength, num_right, ended_wrong=ended_wrong)
        self._all.note(strength, num_right, ended_wrong=ended_wrong)


def strength_of(match: Match) -> int:
    """A class of matches: the longer, the more likely what followed follows again."""
    return min(len(_PRIOR), match.length.bit_length()) - 1


def survivals(rates: Rates, strength: int, num_drafts: int) -> list[float]:
    """For each of so many drafts how likely it is kept, with all before it."""
    return list(accumulate(rates.first(strength, num_drafts), mul))


class StepCost:
    """It says how long steps of decoding rows take, relative to those without drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, int]] = {}
        """By size of the batch: the mean time without drafts, and how many steps it is of."""
        self._drafted: dict[int, dict[int, tuple[float, int, int]]] = {}
        """By size of the batch and number of drafts: the mean factor, of how many steps, when."""
        self._since_plain: dict[int, int] = {}
        """By size of the batch: steps with drafts since one without."""
        self._num_steps = 0

    def note(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        """A step took so long, and had no tokens of prompts."""
        self._num_steps += 1
        size = num_rows.bit_length()
        plain_s, count = self._plain.get(size, (0.0, 0))
        if not num_drafts:
            count = min(count + 1, _KEPT_STEPS)
            taken_s = min(duration_s, _MOST_OF_MEAN * plain_s) if count > 1 else duration_s
            self._plain[size] = plain_s + (taken_s - plain_s) / count, count
            self._since_plain[size] = 0
        elif count:
            self._since_plain[size] = self._since_plain.get(size, 0) + 1
            known = self._drafted.setdefault(size, {})
            expected = self.factor(num_rows, num_drafts)
            factor = min(duration_s / plain_s, _MOST_OF_MEAN * expected)
            bucket = _bucket(num_drafts)
            mean, count, _ = known.get(bucket, (0.0, 0, 0))
            count = min(count + 1, _KEPT_STEPS)
            known[bucket] = mean + (factor - mean) / count, count, self._num_steps

    def is_known(self, num_rows: int) -> bool:
        """Return whether steps of about so many rows were measured without drafts, and lately."""
        size = num_rows.bit_length()
        if self._since_plain.get(size, 0) >= _MOST_DRAFTED:
            return False
        return self._plain.get(size, (0.0, 0))[1] >= _MIN_PLAIN_STEPS

    def factor(self, num_rows: int, num_drafts: int) -> float:
        """A step with so many drafts takes so many times what it takes without."""
        return self.factors(num_rows, range(num_drafts, num_drafts + 1))[0]

    def factors(self, num_rows: int, numbers: range) -> list[float]:
        """The same for several numbers of drafts, of which each is one more than the one before."""
        known = self._drafted.get(num_rows.bit_length(), {})
        # one step may have been disturbed: what few have shown is tried again sooner
        points = [
            (number, mean if mean > 1.0 else 1.0)
            for number, (mean, count, step) in known.items()
            if self._num_steps - step <= _STALE_STEPS * count // _KEPT_STEPS
        ]
        points.sort(reverse=True)
        below, low = 0, 1.0
        slope = _PRIOR_COST / (1.0 + _PRIOR_COST * num_rows)
        found = []
        for number in numbers:
            while points and points[-1][0] <= number:
                below, low = points.pop()
                slope = (low - 1.0) / below
            if points:
                above, high = points[-1]
                share = (number - below) / (above - below)
                found.append(low + share * max(0.0, high - low))
            else:
                found.append(low + slope * (number - below))
        return found


def choose(cost: StepCost, num_rows: int, kept: Sequence[Sequence[float]]) -> list[int]:
    """Return how many drafts each row has in the next step, given for each of its drafts how likely
    it is kept: those that give the most tokens in the time that the step takes."""
    lengths = [0] * len(kept)
    if not cost.is_known(num_rows):
        return lengths
    offering = [row for row, values in enumerate(kept) if values]
    if len(offering) == 1:
        (row,) = offering
        lengths[row] = _best(cost, num_rows, kept[row])
        return lengths
    offered = [(-value, row) for row in offering for value in kept[row]]
    # of equal ones those of the first row
    offered.sort()
    for _, row in offered[: _best(cost, num_rows, [-negative for negative, _ in offered])]:
        lengths[row] += 1
    return lengths


def _best(cost: StepCost, num_rows: int, kept: Sequence[float]) -> int:
    """Return how many of these drafts, the likeliest first, give the most tokens a second."""
    best, best_rate, tokens = 0, num_rows * MIN_GAIN, float(num_rows)
    if not kept:
        return best
    factors = cost.factors(num_rows, range(1, 1 + len(kept)))
    for number, (value, factor) in enumerate(zip(kept, factors, strict=True), start=1):
        tokens += value
        rate = tokens / factor
        if rate > best_rate:
            best, best_rate = number, rate
    return best


def _bucket(number: int) -> int:
    """The number to two binary digits: 1, 2, 3, 4, 6, 8, 12, ..."""
    shift = max(0, number.bit_length() - 2)
    return number >> shift << shift
