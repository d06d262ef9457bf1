"""The batch language of bench_ops: what it says, and what it answers to nonsense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ops.batch import MAX_TOKENS, BatchError, Group, parse_batch


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("q2k", [Group(1, 2048, 2048)]),
        ("q7", [Group(1, 7, 7)]),
        ("8q1s4k", [Group(8, 1, 4096)]),
        ("q512s4k", [Group(1, 512, 4096)]),
        ("3q5s5", [Group(3, 5, 5)]),
        ("q1s1", [Group(1, 1, 1)]),
    ],
)
def test_a_group_is_sequences_new_tokens_and_context(text: str, groups: list[Group]) -> None:
    assert [*parse_batch(text).groups] == groups


def test_groups_are_joined_and_the_shortest_come_first() -> None:
    batch = parse_batch("q512_8q1s4k_2q3s9")
    assert [*batch.groups] == [Group(8, 1, 4096), Group(2, 3, 9), Group(1, 512, 512)]
    assert batch.num_tokens == 8 + 6 + 512
    assert batch.sequences == [(1, 4096)] * 8 + [(3, 9)] * 2 + [(512, 512)]
    assert batch.text == "q512_8q1s4k_2q3s9"


@pytest.mark.parametrize(
    "text", ["", "_", "2k", "q", "qk", "s4k", "q1s", "8q1s4m", "q1 ", "q-1", "Q1", "q1_"]
)
def test_what_is_no_group_is_quoted_with_an_example(text: str) -> None:
    with pytest.raises(BatchError, match="is not a group of sequences") as caught:
        parse_batch(text)
    assert "8q1s4k" in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0q1", "q0", "q0s4", "8q1_0q2s3"])
def test_nothing_is_no_batch(text: str) -> None:
    with pytest.raises(BatchError, match="at least 1"):
        parse_batch(text)


def test_a_context_holds_its_new_tokens() -> None:
    with pytest.raises(BatchError, match="context of 1024 must hold the 2048"):
        parse_batch("q2ks1k")


def test_a_slip_of_the_pen_does_not_fill_the_memory() -> None:
    assert parse_batch(f"q1s{MAX_TOKENS}").num_tokens == 1
    with pytest.raises(BatchError, match="more than"):
        parse_batch(f"q1s{MAX_TOKENS}_q1")
    with pytest.raises(BatchError, match="more than"):
        parse_batch("40000q1s4k")


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 3000), st.integers(0, 3000)),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_what_is_read(groups: list[tuple[int, int, int]]) -> None:
    text = "_".join(f"{count}q{query}s{query + more}" for count, query, more in groups)
    batch = parse_batch(text)
    expected = [Group(count, query, query + more) for count, query, more in groups]
    assert sorted(batch.groups, key=repr) == sorted(expected, key=repr)
    assert batch.num_tokens == sum(count * query for count, query, _ in groups)
    lengths = [query for query, _ in batch.sequences]
    assert lengths == sorted(lengths)
