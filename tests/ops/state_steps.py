"""Steps of rows with states, for the tests of causal_conv, gated_delta and mamba2."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st

from tokenmesh.kernels.state_rows import StateRows

LENGTHS = st.sampled_from([1, 2, 3, 5, 17, 63, 64, 65, 130])
STARTS = st.sampled_from([0, 1, 2, 40, 63, 64, 65, 127])


@dataclass(frozen=True)
class Step:
    """Rows of a step, by the host's numbers."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    num_slots: int

    @property
    def rows(self) -> StateRows:
        """For an op."""
        return StateRows.of(list(self.slots), list(self.starts), list(self.lengths))

    def state(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random where a row has a state, NaN in all other slots."""
        state = torch.full((self.num_slots, *shape), float("nan"), dtype=dtype)
        for slot, start in zip(self.slots, self.starts, strict=True):
            if start > 0:
                state[slot] = torch.randn(shape).to(dtype)
        return state


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Up to five rows, some without tokens, in slots of any order."""
    count = draw(st.integers(1, 5))
    num_slots = count + draw(st.integers(1, 3))
    slots = draw(st.permutations(range(num_slots)))[:count]
    starts = draw(st.lists(STARTS, min_size=count, max_size=count))
    lengths = draw(st.lists(LENGTHS | st.just(0), min_size=count, max_size=count))
    return Step(tuple(slots), tuple(starts), tuple(lengths), num_slots)


@st.composite
def cuts(draw: st.DrawFn, total: int = 150) -> list[int]:
    """Lengths of the parts of a prompt of `total` tokens."""
    borders = draw(st.sets(st.integers(1, total - 1), max_size=4))
    edges = [0, *sorted(borders), total]
    return [last - first for first, last in pairwise(edges)]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Close, and NaN in the same places: of slots that no row may touch."""
    torch.testing.assert_close(
        actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True, check_dtype=True
    )
