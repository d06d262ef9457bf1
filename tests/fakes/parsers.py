"""A parser of a made-up format: `<..>` is reasoning, `{name:arguments}` is a call."""

from tokenmesh.services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParseContext,
    Reasoning,
)


class BracketParser:
    """Every character decides at once, but for a call's name."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._num_calls = 0
        self._state = "content"

    @property
    def is_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[Event]:
        return [event for char in text if (event := self._push(char)) is not None]

    def finish(self) -> list[Event]:
        if self._name is None:
            return []
        return [CallBegin(self._num_calls, self._name)]

    def _push(self, char: str) -> Event | None:
        if self._name is not None:
            return self._push_name(self._name, char)
        if char in "<{>}":
            self._state = {"<": "reasoning", "{": "call"}.get(char, "content")
            self._num_calls += char == "}"
            self._name = "" if char == "{" else None
            return None
        if self._state == "reasoning":
            return Reasoning(char)
        if self._state == "call":
            return CallArguments(self._num_calls, char)
        return Content(char)

    def _push_name(self, name: str, char: str) -> Event | None:
        if char == ":":
            self._name = None
            return CallBegin(self._num_calls, name)
        self._name = name + char
        return None


def _make(context: ParseContext) -> BracketParser:
    return BracketParser()


def _begins(context: ParseContext) -> bool:
    return context.thinking is True


CALLS = ToolFormat(make=_make)
BRACKETS = ReasoningFormat(make=_make, begins=_begins, end=">", tools=CALLS)
"""Both in one parser."""

PLUGINS = {"brackets": f"{__name__}:BRACKETS", "bracket_calls": f"{__name__}:CALLS"}
