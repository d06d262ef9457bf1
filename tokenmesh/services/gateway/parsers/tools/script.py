"""Scripts as parsers, and the script of content with calls between markers.

Calls begin at a marker, alone or in a section with its own markers. A begin marker without a call
after it is content, and so is an end marker without a call before it. An incomplete end marker at
the end of the text is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmesh.services.gateway.parsers.formats import BareCalls, CallFrame, MakeId, ToolFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import Content, Event, ParseContext, Parser
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps

ReadCall = Callable[[CharStream], Steps[None]]
"""Reads the text after a call's begin marker, which is taken and kept. It begins a call or gives
back the text it took; it may take the call's end marker or leave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The markers of one format."""

    calls: tuple[str, ...]
    """Each begins a call, or several calls in a row."""
    ends: tuple[str, ...] = ()
    """End markers of a call and of a section."""
    sections: tuple[str, ...] = ()
    """Begin markers of a section, which come before the first call's marker."""
    all: Markers = field(init=False)
    begins: Markers = field(init=False)

    def __post_init__(self) -> None:
        # Derived fields of a frozen dataclass.
        object.__setattr__(self, "all", Markers(*self.calls, *self.ends, *self.sections))
        object.__setattr__(self, "begins", Markers(*self.calls, *self.sections))


def sections(layout: Layout, read_call: ReadCall) -> Script:
    """The script of a layout; `read_call` reads the calls."""

    def script(stream: CharStream) -> Steps[None]:
        due: set[str] = set()

        def write(text: str) -> None:
            if not (stream.is_whole and any(end.startswith(text) for end in due)):
                stream.content(text)

        while marker := (yield from stream.copy_until(layout.all, write)):
            num_calls = stream.num_calls
            if marker in due:
                due.discard(marker)
                stream.take(len(marker))
                stream.drop_space()
            elif marker in layout.calls:
                stream.keep()
                stream.take(len(marker))
                yield from read_call(stream)
            elif marker in layout.sections:
                yield from _section(stream, layout, marker)
            else:
                stream.content(stream.take(len(marker)))
            if stream.num_calls > num_calls:
                due = set(layout.ends)

    return script


def _section(stream: CharStream, layout: Layout, marker: str) -> Steps[None]:
    stream.keep()
    stream.take(len(marker))
    yield from stream.skip_space()
    if not (yield from stream.at(layout.begins)):
        stream.give_back()


class ScriptParser:
    """Runs a script over the text of one choice."""

    __slots__ = ("_run", "_stream")

    is_reasoning = False

    def __init__(self, script: Script) -> None:
        self._stream = CharStream()
        self._run = script(self._stream)
        next(self._run)

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        self._stream.feed(text)
        next(self._run)
        return self._stream.pop_events()

    def finish(self) -> list[Event]:
        self._stream.is_whole = True
        for _ in self._run:
            raise AssertionError("the script waits for text after the end")
        self._stream.finish()
        return self._stream.pop_events()


class PlainText:
    """The parser of a request without tools: all text is content."""

    __slots__ = ()

    is_reasoning = False

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def tool_format(
    script: Callable[[ParseContext], Script],
    *,
    needs_special_tokens: bool = True,
    make_ids: Callable[[ParseContext], MakeId] | None = None,
    frame: CallFrame | None = None,
    bare: BareCalls | None = None,
    begins: tuple[str, ...] = (),
) -> ToolFormat:
    """A format from a function that makes the script for a request."""

    def make(context: ParseContext) -> Parser:
        return ScriptParser(script(context)) if context.tools else PlainText()

    return ToolFormat(
        make=make,
        needs_special_tokens=needs_special_tokens,
        make_ids=make_ids,
        frame=frame,
        bare=bare,
        begins=begins,
    )
