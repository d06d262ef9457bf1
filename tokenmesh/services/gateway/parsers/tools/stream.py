"""CharStream: a Source, and the events that a script makes of it.

White space beside a call is the format's and not the answer's: what stands between content and a
call, between calls, or after the last one is dropped when nothing but white space does. All other
text that is no part of a call is content, wherever it stands.
"""

from collections.abc import Callable

from tokenmesh.services.gateway.parsers.events import CallArguments, CallBegin, Content, Event
from tokenmesh.services.gateway.parsers.tools.source import CharSource, Steps


class CharStream(CharSource):
    """What a script reads from and writes to."""

    __slots__ = ("_call", "_events", "_is_after_call", "_pieces", "_space", "num_calls")

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self._events: list[Event] = []
        self._pieces: list[str] = []
        self._call: int | None = None
        self._space: list[str] = []
        self._is_after_call = False

    def content(self, text: str) -> None:
        """Text of the answer; white space at its end waits for what follows."""
        solid = text.rstrip()
        if solid:
            self._flush_space()
            self._add(None, solid)
            self._is_after_call = False
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def drop_space(self) -> None:
        """The white space at the end of the content so far is the format's."""
        self._space.clear()

    def give_back(self) -> None:
        """What was kept turns out to be content."""
        if kept := self.pop_kept():
            self.content(kept)

    def begin_call(self, name: str, model_id: str | None = None) -> None:
        """A call whose name is known: what was kept has been understood."""
        self.drop_kept()
        self._close()
        self._space.clear()
        self._is_after_call = True
        self._events.append(CallBegin(self.num_calls, name, model_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More JSON text of the arguments of the call that began last."""
        if text:
            self._add(self.num_calls - 1, text)

    def pop_events(self) -> list[Event]:
        """What has become certain since it was last asked."""
        self._close()
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """The text has ended and the script is done."""
        if not self._is_after_call:
            self._flush_space()

    def _flush_space(self) -> None:
        if self._space:
            self._add(None, "".join(self._space))
            self._space.clear()

    def _add(self, call: int | None, text: str) -> None:
        if call != self._call:
            self._close()
            self._call = call
        self._pieces.append(text)

    def _close(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            call = self._call
            self._events.append(Content(text) if call is None else CallArguments(call, text))
            self._pieces.clear()


Script = Callable[[CharStream], Steps[None]]
"""Reads a stream to its end: returns only when its text is whole and taken."""


def copy_content(stream: CharStream) -> Steps[None]:
    """The script of text in which nothing is a call, or nothing can be one any more."""
    while (yield from stream.peek()):
        text, pos = stream.window()
        stream.content(stream.take(len(text) - pos))
