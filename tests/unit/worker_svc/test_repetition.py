"""Repetition: the rule against a plain statement of it, and a bound on its work."""

from hypothesis import example, given
from hypothesis import strategies as st

from tokenmesh.engine.request.repetition import ends_in_loop
from tokenmesh.shared.messages.sampling import RepetitionRule

RULES = st.builds(
    lambda size, more, count: RepetitionRule(max_size=size + more, min_size=size, min_count=count),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(2, 4),
)


def is_loop(output: list[int], rule: RepetitionRule) -> bool:
    """Some pattern of an allowed size, written `min_count` times, is the output's end."""
    for size in range(rule.min_size, rule.max_size + 1):
        loop = output[len(output) - size :] * rule.min_count
        if size <= len(output) and output[len(output) - len(loop) :] == loop:
            return len(loop) <= len(output)
    return False


@given(st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 1), min_size=1), RULES)
@example([1, 1], [1], RepetitionRule(max_size=1, min_count=3))
def test_only_the_output_counts(prompt: list[int], output: list[int], rule: RepetitionRule) -> None:
    assert ends_in_loop(prompt + output, len(prompt), rule) == is_loop(output, rule)


def test_a_pattern_must_be_whole_and_at_the_end() -> None:
    rule = RepetitionRule(max_size=3, min_size=2, min_count=3)
    output = [7, 1, 2, 1, 2, 1, 2]
    assert ends_in_loop(output, 0, rule)
    assert not ends_in_loop(output[2:], 0, rule)
    assert not ends_in_loop([*output, 3], 0, rule)
