"""Chain: a reasoning parser, and a tool parser for the content that it leaves."""

from tokenmesh.services.gateway.parsers.events import Content, Event
from tokenmesh.services.gateway.parsers.parser import Parser


class Chain:
    """Both as one parser."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_reasoning(self) -> bool:
        """Whether the last character pushed belongs to reasoning."""
        return self._reasoning.is_reasoning

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        return self._pass_on(self._reasoning.push(text))

    def finish(self) -> list[Event]:
        """The rest."""
        return self._pass_on(self._reasoning.finish()) + self._tools.finish()

    def _pass_on(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if type(event) is Content:
                passed.extend(self._tools.push(event.text))
            else:
                passed.append(event)
        return passed
