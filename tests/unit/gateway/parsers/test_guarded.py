"""When a plugin raises, the rest of the text is content."""

import logging
from typing import NoReturn

import pytest

from tests.fakes.parsers import BracketParser
from tests.unit.gateway.parsers.harness import parse
from tokenmesh.services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParseContext,
    Parser,
    ToolSchema,
)
from tokenmesh.services.gateway.parsers.registry import ParserRegistry

HERE = __name__
CONTEXT = ParseContext(tools=(ToolSchema(name="f", parameters={}),))


class Fragile(BracketParser):
    """Raises at a "!", and at the end of a text with a "?"."""

    _doubts = False

    def push(self, text: str) -> list[Event]:
        self._doubts |= "?" in text
        if "!" in text:
            _raise()
        return super().push(text)

    def finish(self) -> list[Event]:
        return _raise() if self._doubts else super().finish()


class Shy(BracketParser):
    """Raises in `is_reasoning`."""

    @property
    def is_reasoning(self) -> bool:
        return _raise()


def _raise() -> NoReturn:
    raise KeyError("a mistake in a plugin")


def broken(context: ParseContext) -> Parser:
    """Raises when a parser is made."""
    return _raise()


FRAGILE = ToolFormat(make=lambda context: Fragile())
UNMADE = ToolFormat(make=broken)
BOTH = ReasoningFormat(
    make=lambda context: Shy(), begins=lambda context: bool(broken(context)), tools=FRAGILE
)
PLUGINS = {name: f"{HERE}:{name.upper()}" for name in ("fragile", "unmade", "both")}
REGISTRY = ParserRegistry(PLUGINS)


def make(reasoning: str, tools: str) -> Parser:
    parser = REGISTRY.family(reasoning, tools).make(CONTEXT)
    assert parser is not None
    return parser


@pytest.mark.parametrize(
    ("tools", "events"),
    [
        ("fragile", [CallBegin(0, "f"), CallArguments(0, "a"), Content("b!c{g:}")]),
        ("unmade", [Content("{f:ab!c{g:}")]),
    ],
)
def test_the_rest_is_content(
    tools: str, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    assert parse(lambda: make("", tools), ["{f:a", "b!c", "{g:}"]) == events
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


def test_an_end_that_raises_ends_the_answer() -> None:
    assert parse(lambda: make("", "fragile"), ["a", "?"]) == [Content("a?")]


def test_a_reasoning_parser_that_raises_finds_no_reasoning() -> None:
    family = REGISTRY.family("both", "fragile")
    assert not family.begins_reasoning(CONTEXT)
    parser = make("both", "fragile")
    parser.push("<")
    assert not parser.is_reasoning
    assert parser.push("{f:}") == [Content("{f:}")]


def test_a_plugin_of_both_kinds_stays_one_parser() -> None:
    family = REGISTRY.family("both", "fragile")
    assert family.reasoning is not None
    assert family.tools is family.reasoning.tools
