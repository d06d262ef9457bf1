"""Paths by dynamic time warping are those of transformers."""

import numpy
import pytest
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from tokenmesh.engine.models.alignment import first_states


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (3, 40), (12, 30), (20, 9)])
@pytest.mark.parametrize("has_ties", [False, True])
def test_a_path_is_that_of_transformers(shape: tuple[int, int], has_ties: bool) -> None:
    costs = numpy.random.default_rng(sum(shape)).normal(size=shape)
    if has_ties:
        costs = costs.round()
    tokens, states = _dynamic_time_warping(costs)
    is_first = numpy.diff(tokens, prepend=-1).astype(bool)
    found = first_states(costs)
    assert found == states[is_first].tolist()
    assert {type(each) for each in found} == {int}
