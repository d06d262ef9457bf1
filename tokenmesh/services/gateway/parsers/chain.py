"""Chain: a reasoning parser, and a tool parser for the content that it leaves."""

from collections.abc import Iterable, Iterator

from tokenmesh.services.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from tokenmesh.services.gateway.parsers.parser import Parser


class Chain:
    """Both as one parser."""

    __slots__ = ("_indexes", "_reasoning", "_tools")

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._indexes: dict[tuple[Parser, int], int] = {}
        """Of calls: of harmony models both parsers may find some, each counting from 0."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the last character pushed belongs to reasoning."""
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        return self._pass_on(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        """The rest."""
        passed = self._pass_on(self._reasoning.finish())
        return [*passed, *self._numbered(self._tools, self._tools.finish())]

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if type(event) is Content:
                passed.extend(self._numbered(self._tools, self._tools.push(event.text)))
            else:
                passed.extend(self._numbered(self._reasoning, (event,)))
        return passed

    def _numbered(self, source: Parser, events: Iterable[Event]) -> Iterator[Event]:
        """Events of one of the parsers, with calls counted over both."""
        for event in events:
            if type(event) is CallBegin:
                index = self._indexes[source, event.index] = len(self._indexes)
                yield CallBegin(index, event.name, event.model_id)
            elif type(event) is CallArguments:
                yield CallArguments(self._indexes[source, event.index], event.text)
            else:
                yield event
