"""Properties for any text: no exception, the same events on any cut, nothing lost."""

import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rounds import counts
from tests.unit.gateway.parsers.harness import joined, parse, texts
from tests.unit.gateway.parsers.tool_formats import (
    ONLY_AT_START,
    OTHER_WRITERS,
    WRITERS,
    Call,
    calls_of,
    content_of,
    maker,
)
from tokenmesh.services.gateway.parsers.parser import CallBegin, Event
from tokenmesh.services.gateway.parsers.registry import TOOLS
from tokenmesh.services.gateway.parsers.tools import (
    gemma,
    headed,
    json_families,
    markup,
    pythonic,
)

DISTINCT = sorted({TOOLS[family]: family for family in WRITERS}.values())
ALL_WRITERS = [*((family, WRITERS[family]) for family in DISTINCT), *OTHER_WRITERS]

Write = Callable[[Sequence[Call]], str]

CALLS = (
    Call("get_weather", {"city": "Worda\n\nWordb", "days": 12, "tags": ["Wordc", {"k": "Wordd"}]}),
    Call("now", {}),
    Call("Worde", {"x": "Wordf", "y": "Wordg"}),
)


def _before_the_end(family: str, text: str) -> list[Event]:
    return joined(maker(family)().push(text))


@pytest.mark.parametrize(
    ("family", "write"), ALL_WRITERS, ids=[f"{f}-{i}" for i, (f, _) in enumerate(ALL_WRITERS)]
)
def test_text_cut_off_anywhere_loses_no_word_and_no_earlier_event(
    family: str, write: Write
) -> None:
    before = "" if family in ONLY_AT_START else "Wordh wordi. "
    text = f"{before}{write(CALLS)}\nWordj"
    whole = parse(maker(family), [text])
    words = [(match.group(), match.end()) for match in re.finditer(r"Word[a-z]", text)]
    assert len(words) == 9 - (not before)
    for end in range(len(text)):
        early = _before_the_end(family, text[:end])
        assert _is_beginning(early, whole), text[:end]
        cut = texts(parse(maker(family), [text[:end]]))
        for word, place in words:
            assert place > end or word in cut, (word, text[:end])


def _is_beginning(early: Sequence[Event], whole: Sequence[Event]) -> bool:
    names = [name for name, _ in calls_of(early)]
    arguments = [text for _, text in calls_of(early)]
    return (
        names == [name for name, _ in calls_of(whole)][: len(names)]
        and all(b.startswith(a) for a, (_, b) in zip(arguments, calls_of(whole), strict=False))
        and content_of(whole).startswith(content_of(early))
    )


PIECES = {
    gemma: ["call:f{", "call:", "a:1", "a:", "f", "{a:[1,{b:", "true"],
    headed: [
        *("functions.f:0", "f", "function", "```json", "```", "\n"),
        *("[ARGS]", "[CALL_ID]", '{"name": "f", "arguments": {"a": 1}}'),
    ],
    json_families: [
        *('{"name": "f", "arguments": {"a": 1}}', '"name": "f"', '"arguments": '),
        *('[{"f": ', '{"f": {"a": 1}}', '"f"', "f"),
    ],
    markup: [
        *("f>", "a>", "'f'>", '"f">', ">", 'name="a" string="true">'),
        *("f", "get_weather", "city", "days", "\n"),
    ],
    pythonic: ["f(", "a=", "[f(a=1)]", "=", ")", "'", "'''", "\\", "g()", "(", "None"],
}
JSON_PIECES = ["{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "{}", '{"a": [1, "x"]}', "null"]
MARKER = re.compile(r"</?[^\s<>]*[>=]|<[^\s<>]+ name=|\[[A-Z_]+\]|functools|```(?:json)?")


def _pieces(family: str) -> list[str]:
    """A family's markers, the beginnings of them, and pieces of calls and JSON."""
    writers = [write for name, write in ALL_WRITERS if name == family]
    markers = {found for write in writers for found in MARKER.findall(write(CALLS))}
    module = next(each for each in PIECES if TOOLS[family] in vars(each).values())
    cut = {marker[:-1] for marker in markers}
    return sorted({*markers, *cut, *PIECES[module], *JSON_PIECES})


@st.composite
def _edited_texts(draw: st.DrawFn, family: str) -> str:
    """Well-formed calls, then a few places where something is missing or too much."""
    writers = [write for name, write in ALL_WRITERS if name == family]
    calls = draw(st.lists(st.sampled_from(CALLS), min_size=1, max_size=3))
    text: str = draw(st.sampled_from(writers))(calls) + draw(st.sampled_from(["", "\n", " x "]))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(text)))
        num_missing = draw(st.integers(0, 12))
        piece = draw(st.just("") | st.sampled_from(_pieces(family)))
        text = text[:place] + piece + text[place + num_missing :]
    return text


def _texts(family: str) -> st.SearchStrategy[str]:
    piece = st.sampled_from(_pieces(family)) | st.text(max_size=3)
    return st.lists(piece, max_size=25).map("".join) | _edited_texts(family)


@counts("num_examples", 10, 80)
@pytest.mark.parametrize("family", DISTINCT)
def test_any_text_gives_the_same_on_any_cut(family: str, num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(text=_texts(family), data=st.data())
    def check(text: str, data: st.DataObject) -> None:
        whole = parse(maker(family), [text])
        texts(whole).encode()
        assert parse(maker(family), list(text)) == whole
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        portions = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(maker(family), portions) == whole
        if not calls_of(whole):
            assert content_of(whole) == text

    check()


@counts("num_examples", 10, 80)
@pytest.mark.parametrize("family", DISTINCT)
def test_no_word_anywhere_is_lost(family: str, num_examples: int) -> None:
    @settings(max_examples=num_examples)
    @given(text=_texts(family), data=st.data())
    def check(text: str, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(text)))
        events = parse(maker(family), [f"{text[:place]}Wordz{text[place:]}"])
        assert "Wordz" in texts(events) or _is_other_member(text[:place]) or _is_id(events)

    check()


def _is_other_member(before: str) -> bool:
    """Return whether the text before is a JSON call's other member, which is dropped."""
    return '"' in before[before.rfind("{") :]


def _is_id(events: Sequence[Event]) -> bool:
    return any(isinstance(each, CallBegin) and "Wordz" in (each.model_id or "") for each in events)
