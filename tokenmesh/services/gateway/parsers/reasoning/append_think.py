"""AppendThinkParser: reasoning stays in the content, as MiniMax M2's own clients expect it."""

from typing import Final

from tokenmesh.services.gateway.parsers.events import Content, Event
from tokenmesh.services.gateway.parsers.formats import ReasoningFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext

_START: Final = "<think>"


class AppendThinkParser:
    """Writes the start marker that the prompt has swallowed before the content."""

    __slots__ = ("_has_begun",)

    def __init__(self, _context: ParseContext) -> None:
        self._has_begun = False

    @property
    def is_reasoning(self) -> bool:
        """Never: nothing is told apart."""
        return False

    def push(self, text: str) -> list[Event]:
        """The text, the first time with the marker."""
        if self._has_begun:
            return [Content(text)] if text else []
        self._has_begun = True
        return [Content(_START + text)]

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return [] if self._has_begun else self.push("")


MINIMAX_M2_APPEND_THINK = ReasoningFormat(
    make=AppendThinkParser, begins=lambda _context: True, start=_START, end="</think>"
)
