"""Stop strings are found wherever pieces of text are cut, and nothing is lost or shown too soon."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmesh.shared.text import StopMatcher, StopStrings

SMALL = st.text(alphabet="ab ", max_size=30)
STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """All text that is passed on, and the stop string that was found."""
    matcher = StopMatcher(StopStrings(stops), include)
    shown = ""
    for piece in pieces:
        scan = matcher.push(piece)
        shown += scan.text
        if scan.stop is not None:
            return shown, scan.stop
    return shown + matcher.finish(), None


def earliest(stops: list[str], text: str) -> tuple[str, str | None]:
    """The specification: the first place where a stop string is complete, the longest one there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_a_stop_string_within_one_piece_is_cut_off() -> None:
    assert run(["END"], ["before END after"]) == ("before ", "END")


def test_a_stop_string_across_pieces_never_shows() -> None:
    assert run(["END"], ["x E", "N", "D y"]) == ("x ", "END")


def test_a_stop_string_can_be_part_of_the_text() -> None:
    assert run(["END"], ["x E", "ND y"], include=True) == ("x END", "END")


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    assert run(["END"], ["x EN", "C"]) == ("x ENC", None)
    assert run(["END"], ["x EN"]) == ("x EN", None)


def test_text_is_held_back_no_longer_than_needed() -> None:
    matcher = StopMatcher(StopStrings(["aab"]))
    assert [matcher.push(char).text for char in "aaac"] == ["", "", "a", "aac"]


def test_a_stop_string_may_begin_where_none_may_end_yet() -> None:
    matcher = StopMatcher(StopStrings(["bc", "ab"]))
    assert matcher.push("xab", may_stop=False) == ("x", None)
    assert matcher.push("c") == ("a", "bc")


def test_one_that_came_too_early_is_text() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.push("ab", may_stop=False) == ("", None)
    assert matcher.push("c") == ("abc", None)


def test_of_two_at_the_same_end_the_longer_counts() -> None:
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")


def test_the_first_complete_one_counts_even_inside_another() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


@settings(max_examples=200)
@given(stops=STOPS, text=SMALL, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_any_cut_of_any_text_gives_the_same_result(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert run(stops, pieces) == earliest(stops, text)
