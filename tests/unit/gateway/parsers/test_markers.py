"""MarkedText finds what a search in the whole text finds, and holds back no more than it must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers

SMALL = st.text(alphabet="<ab>", max_size=24)
MARKERS = st.lists(st.text(alphabet="<ab>", min_size=1, max_size=4), min_size=1, max_size=4)


def take_all(markers: Markers, portions: list[str]) -> list[tuple[str, str | None]]:
    """Everything taken, neighbouring texts joined."""
    marked = MarkedText()
    found: list[tuple[str, str | None]] = []
    text = ""
    for portion in [*portions, None]:
        if portion is None:
            marked.finish()
        else:
            marked.push(portion)
        marker: str | None = ""
        while marker is not None:
            taken, marker = marked.take(markers)
            text += taken
            if marker is not None:
                found.append((text, marker))
                text = ""
    return [*found, (text, None)]


def specification(markers: list[str], text: str) -> list[tuple[str, str | None]]:
    """The leftmost marker, the longest there, again and again."""
    found: list[tuple[str, str | None]] = []
    begin = at = 0
    while at < len(text):
        here = [marker for marker in markers if text.startswith(marker, at)]
        if not here:
            at += 1
            continue
        marker = max(here, key=len)
        found.append((text[begin:at], marker))
        begin = at = at + len(marker)
    return [*found, (text[begin:], None)]


@settings(max_examples=300)
@given(MARKERS, st.lists(SMALL, max_size=6))
def test_taken_text_does_not_depend_on_chunks(markers: list[str], portions: list[str]) -> None:
    expected = specification(markers, "".join(portions))
    assert take_all(Markers(*markers), portions) == expected
    assert take_all(Markers(*markers), list("".join(portions))) == expected


@settings(max_examples=300)
@given(MARKERS, SMALL)
def test_text_is_held_back_only_where_a_marker_may_begin(markers: list[str], text: str) -> None:
    marked, made = MarkedText(), Markers(*markers)
    marked.push(text)
    num_taken = 0
    marker: str | None = ""
    while marker is not None:
        taken, marker = marked.take(made)
        num_taken += len(taken) + len(marker or "")
    held = text[num_taken:]
    assert not held or any(each.startswith(held) and each != held for each in markers)


@settings(max_examples=300)
@given(MARKERS, st.lists(SMALL, max_size=4))
def test_a_leading_marker_does_not_depend_on_portions(
    markers: list[str], portions: list[str]
) -> None:
    marked, made = MarkedText(), Markers(*markers)
    marked.push("  ")
    found = marked.take_leading(made)
    for portion in portions:
        marked.push(portion)
        if found is None:
            found = marked.take_leading(made)
    marked.finish()
    if found is None:
        found = marked.take_leading(made)
    text = "".join(portions)
    here = [marker for marker in markers if text.startswith(marker)]
    assert found == max(here, key=len, default="")
    assert marked.take_all() == (text[len(found) :] if found else "  " + text)


def test_a_marker_across_portions_never_shows() -> None:
    marked, markers = MarkedText(), Markers("</think>")
    taken = []
    for portion in ("a</", "thi", "nk>b"):
        marked.push(portion)
        taken.append(marked.take(markers))
    assert taken == [("a", None), ("", None), ("", "</think>")]
    assert marked.take(markers) == ("b", None)


def test_an_incomplete_marker_is_text() -> None:
    marked, markers = MarkedText(), Markers("</think>")
    marked.push("a</thin")
    assert marked.take(markers) == ("a", None)
    marked.push("g")
    assert marked.take(markers) == ("</thing", None)
