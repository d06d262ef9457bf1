"""ScriptParser: a script as a Parser, and the table entry of a format that a script reads."""

from collections.abc import Callable

from tokenmesh.services.gateway.parsers.events import Content, Event
from tokenmesh.services.gateway.parsers.formats import CallFrame, MakeId, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script


class ScriptParser:
    """Drives one script over one choice's text."""

    __slots__ = ("_run", "_stream")

    is_reasoning = False

    def __init__(self, script: Script) -> None:
        self._stream = CharStream()
        self._run = script(self._stream)
        next(self._run)

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        if not text:
            return []
        self._stream.feed(text)
        next(self._run)
        return self._stream.pop_events()

    def finish(self) -> list[Event]:
        """The rest, when the model has ended, wherever it stopped."""
        self._stream.is_whole = True
        for _ in self._run:
            raise AssertionError("a script waits for text after the end")
        self._stream.finish()
        return self._stream.pop_events()


class PlainText:
    """The parser of a request without tools: all text is content."""

    __slots__ = ()

    is_reasoning = False

    def push(self, text: str) -> list[Event]:
        """The text."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is ever held back."""
        return []


def tool_format(
    script: Callable[[ParseContext], Script],
    *,
    needs_special_tokens: bool = True,
    make_ids: Callable[[ParseContext], MakeId] | None = None,
    frame: CallFrame | None = None,
) -> ToolFormat:
    """The format whose script for one request the function makes."""

    def make(context: ParseContext) -> Parser:
        return ScriptParser(script(context)) if context.tools else PlainText()

    return ToolFormat(
        make=make, needs_special_tokens=needs_special_tokens, make_ids=make_ids, frame=frame
    )
