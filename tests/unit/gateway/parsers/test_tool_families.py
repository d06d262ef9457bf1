"""Every family's well-formed calls are read, however the text is cut."""

import json
from collections.abc import Callable, Sequence

import pytest

from tests.rounds import counts
from tests.unit.gateway.parsers.harness import check_chunkings, parse
from tests.unit.gateway.parsers.tool_formats import (
    ONLY_AT_START,
    OTHER_WRITERS,
    TYPICAL_CALLS,
    WRITERS,
    Call,
    calls_of,
    content_of,
    maker,
)
from tokenmesh.services.gateway.parsers.parser import CallBegin, Content
from tokenmesh.services.gateway.parsers.registry import TOOLS

ALL_WRITERS = [*WRITERS.items(), *OTHER_WRITERS]
IDS = [f"{family}-{place}" for place, (family, _) in enumerate(ALL_WRITERS)]
Write = Callable[[Sequence[Call]], str]
PYTHONIC = {"lfm2", "llama4_pythonic", "olmo3", "pythonic"}


def _fits(family: str, name: str) -> bool:
    """A Python name has no dash."""
    return not (family in PYTHONIC and name == "unknown function")


def test_every_family_has_a_writer() -> None:
    # "openai" is harmony, which has no tool parser.
    assert {*WRITERS, "openai"} == set(TOOLS)


@pytest.mark.parametrize(("family", "write"), ALL_WRITERS, ids=IDS)
def test_typical_calls_are_read_however_the_text_is_cut(family: str, write: Write) -> None:
    for name, calls in TYPICAL_CALLS.items():
        if not _fits(family, name):
            continue
        # every single split of three of them is in `test_random_chunkings_give_the_same`
        events = check_chunkings(maker(family), write(calls), count=20, step=5)
        got = [(name, json.loads(text)) for name, text in calls_of(events)]
        assert got == [tuple(call) for call in calls], name
        assert content_of(events) == "", name


DISTINCT = list({TOOLS[family]: family for family in WRITERS}.values())


@counts("chunkings", 10, 1000)
@pytest.mark.parametrize(
    ("family", "write"), [(family, WRITERS[family]) for family in DISTINCT], ids=DISTINCT
)
def test_random_chunkings_give_the_same(family: str, write: Write, chunkings: int) -> None:
    calls = [call for name in ("parallel", "nested", "escapes") for call in TYPICAL_CALLS[name]]
    before = "" if family in ONLY_AT_START else "Let me <b>see</b>.\n\n"
    events = check_chunkings(maker(family), before + write(calls) + "\n", chunkings)
    assert content_of(events) == before.rstrip()
    got = [(name, json.loads(text)) for name, text in calls_of(events)]
    assert got == [tuple(call) for call in calls]


@pytest.mark.parametrize(("family", "write"), ALL_WRITERS, ids=IDS)
def test_text_after_calls_is_content(family: str, write: Write) -> None:
    text = write(TYPICAL_CALLS["parallel"])
    events = check_chunkings(maker(family), f"{text}\n\nSo it is. ", count=20, step=5)
    assert len(calls_of(events)) == 3
    assert events[-1] == Content("\n\nSo it is. ")
    assert content_of(events) == "\n\nSo it is. "


@pytest.mark.parametrize("family", sorted(WRITERS))
@pytest.mark.parametrize(
    "text",
    [
        "Paris it is.",
        " \n ",
        "if a < b and c[0] > {1}: print('<tool') # ``` \n\n",
        "Nothing (at all) [1], see [here](there) {'a': 1} \U0001f600",
    ],
)
def test_text_without_calls_is_content(family: str, text: str) -> None:
    assert check_chunkings(maker(family), text, count=50) == [Content(text)]


@pytest.mark.parametrize(("family", "write"), ALL_WRITERS, ids=IDS)
def test_without_tools_everything_is_content(family: str, write: Write) -> None:
    text = write(TYPICAL_CALLS["parallel"])
    assert parse(maker(family, tools=()), list(text)) == [Content(text)]


@pytest.mark.parametrize("family", sorted(WRITERS.keys() - ONLY_AT_START))
def test_content_is_emitted_before_the_call_is_complete(family: str) -> None:
    parser = maker(family)()
    assert parser.push("Let me see.") == [Content("Let me see.")]
    events = parser.push(WRITERS[family](TYPICAL_CALLS["single"]))
    assert isinstance(events[0], CallBegin)


def test_ids_of_kimi_are_its_own() -> None:
    events = parse(maker("kimi_k2"), [WRITERS["kimi_k2"](TYPICAL_CALLS["parallel"])])
    ids = [event.model_id for event in events if isinstance(event, CallBegin)]
    assert ids == ["functions.get_weather:0", "functions.now:1", "functions.get_weather:2"]


@pytest.mark.parametrize("write", [write for family, write in ALL_WRITERS if family == "mistral"])
def test_ids_of_mistral_have_nine_letters_and_digits(write: Write) -> None:
    text = write(TYPICAL_CALLS["parallel"])
    first, again, other = (
        [event.model_id for event in parse(maker("mistral", seed=seed), [text])
         if isinstance(event, CallBegin)]
        for seed in ("a", "a", "b")
    )  # fmt: skip
    assert first == again
    assert all(each and len(each) == 9 and each.isalnum() for each in first)
    if "[CALL_ID]" in text:
        assert first == ["abcdefgh1"] * 3
    else:
        assert len({*first, *other}) == 6
