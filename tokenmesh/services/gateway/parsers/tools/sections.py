"""Layouts: content, and calls that begin at a marker, alone or in a section with its own markers.

A begin marker that no call follows is content, and so is an end marker that no call precedes. An
end marker that the text's end cuts off is none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script

ReadCall = Callable[[CharStream], Steps[None]]
"""Reads what follows a call's begin marker, which is taken and kept: begins a call, or gives back
what it took. Returns with a call's end marker not taken, or taken, as it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The markers of one format."""

    calls: tuple[str, ...]
    """One of these begins a call, or several calls in a row."""
    ends: tuple[str, ...] = ()
    """What may follow a call: of a call and of a section."""
    sections: tuple[str, ...] = ()
    """These may precede a call's marker, in a row."""
    all: Markers = field(init=False)
    begins: Markers = field(init=False)

    def __post_init__(self) -> None:
        # A frozen dataclass's way to hold what its fields imply.
        object.__setattr__(self, "all", Markers(*self.calls, *self.ends, *self.sections))
        object.__setattr__(self, "begins", Markers(*self.calls, *self.sections))


def sections(layout: Layout, read_call: ReadCall) -> Script:
    """The script of a layout."""

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
