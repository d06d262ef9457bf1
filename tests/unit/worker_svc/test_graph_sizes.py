"""Decode steps of some sizes are recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.engine.exec.cuda.graphs import Graphs, graph_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "largest", "sizes"),
    [
        (1, 512, [1]),
        (5, 512, [1, 2, 4, 5]),
        (30, 512, [1, 2, 4, 8, 16, 24, 30]),
        (1024, 20, [1, 2, 4, 8, 16, 20]),
        (256, 0, []),
    ],
)
def test_sizes_end_with_the_lower_bound(max_num_seqs: int, largest: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs, largest) == sizes


def test_large_sizes_are_16_apart() -> None:
    assert graph_sizes(1024, 512)[-17:] == list(range(256, 513, 16))


@given(max_num_seqs=st.integers(1, 2000), largest=st.integers(1, 600), rows=st.integers(1, 2000))
def test_the_smallest_size_that_holds_the_rows_is_used(
    max_num_seqs: int, largest: int, rows: int
) -> None:
    sizes = graph_sizes(max_num_seqs, largest)
    size = Graphs(sizes).size_for(rows)
    if rows > min(max_num_seqs, largest):
        assert size is None
        return
    assert size is not None
    assert size >= rows
    assert not any(rows <= other < size for other in sizes)
