"""HarmonyParser: reasoning, content and calls of harmony messages, special tokens shown."""

from collections.abc import Collection
from typing import Final

from tokenmesh.services.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from tokenmesh.services.gateway.parsers.harmony.header import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyHeader,
    read_header,
    stray_text,
)
from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers

_FUNCTIONS: Final = "functions."
_LONGEST_HEADER: Final = 512
"""Characters; longer ones are text of a model that has left the format."""

_HEADER_BEGINS: Final = Markers(START, CHANNEL, CONSTRAIN, MESSAGE, "to=", END, CALL, RETURN)
_IN_HEADER: Final = Markers(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_IN_BODY: Final = Markers(START, CHANNEL, END, CALL, RETURN)
_OPENS: Final = frozenset({START, CHANNEL, CONSTRAIN, "to="})


class HarmonyParser:
    """Messages follow one another; those of one kind are joined by a newline.

    A message on the channel `analysis` is reasoning, any other is content, and one to
    `functions.name` is a call. What the model tells a recipient that is no tool is reasoning.
    """

    def __init__(self, tools: Collection[str], header: str, has_body: bool) -> None:
        """`header`: what the prompt holds of the first one; `has_body`: and of its message."""
        self._tools = frozenset(tools)
        self._text = MarkedText()
        self._header = header
        self._is_between = not has_body and CHANNEL not in header
        self._in_body = False
        self._kind: type[Reasoning] | type[Content] | None = None
        self._told: set[type[Reasoning] | type[Content]] = set()
        self._num_calls = 0
        self._has_text = False
        self._begun: list[Event] = []
        if has_body:
            self._begin_body(self._begun)

    @property
    def is_reasoning(self) -> bool:
        """Whether the last character pushed belongs to reasoning."""
        return self._in_body and self._kind is Reasoning

    def push(self, text: str) -> list[Event]:
        """What has become certain with these characters."""
        self._text.push(text)
        return self._read()

    def finish(self) -> list[Event]:
        """The rest. The token that ends a call is mostly not part of the text."""
        self._text.finish()
        events = self._read()
        if self._in_body:
            self._end_body(events)
        else:
            self._tell(events, Content, stray_text(self._header))
        return events

    def _read(self) -> list[Event]:
        events, self._begun = self._begun, []
        while self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        """Read as far as the next marker; False when there is none yet."""
        if self._in_body:
            return self._read_body(events)
        if self._is_between:
            return self._read_between(events)
        return self._read_header(events)

    def _read_between(self, events: list[Event]) -> bool:
        """Before a message, where a header should begin."""
        marker = self._text.take_leading(_HEADER_BEGINS)
        if marker is None:
            return False
        self._is_between = False
        if marker:
            self._meet(events, marker)
        else:
            self._begin_plain()
        return True

    def _begin_plain(self) -> None:
        """Text without a header is an answer."""
        self._header = ""
        self._in_body = True
        self._kind = Content
        self._has_text = False

    def _read_header(self, events: list[Event]) -> bool:
        text, marker = self._text.take(_IN_HEADER)
        if len(self._header) + len(text) > _LONGEST_HEADER:
            self._tell(events, Content, self._header)
            self._begin_plain()
            self._has_text = True
            self._text.give_back(text + (marker or ""))
            return True
        self._header += text
        if marker is not None:
            self._meet(events, marker)
        return marker is not None

    def _meet(self, events: list[Event], marker: str) -> None:
        """A marker outside of a message's body."""
        if marker == START:
            self._tell(events, Content, stray_text(self._header))
            self._header = START
        elif marker in _OPENS:
            self._header += f" {marker}"
        elif marker == MESSAGE:
            self._begin_body(events)
        else:
            self._tell(events, Content, stray_text(self._header))
            self._header = ""
            self._is_between = True

    def _begin_body(self, events: list[Event]) -> None:
        header = read_header(self._header)
        self._header = ""
        self._in_body, self._is_between, self._has_text = True, False, False
        name = self._called(header)
        if name:
            self._kind = None
            events.append(CallBegin(self._num_calls, name))
        elif header.channel == "analysis" or (header.recipient and not self._is_function(header)):
            self._kind = Reasoning
        else:
            self._kind = Content

    def _called(self, header: HarmonyHeader) -> str:
        if not self._tools:
            return ""
        if self._is_function(header):
            return header.recipient.removeprefix(_FUNCTIONS)
        return header.recipient if header.recipient in self._tools else ""

    def _is_function(self, header: HarmonyHeader) -> bool:
        return header.recipient.startswith(_FUNCTIONS)

    def _read_body(self, events: list[Event]) -> bool:
        text, marker = self._text.take(_IN_BODY)
        self._tell_body(events, text)
        if marker is None:
            return False
        self._end_body(events)
        self._is_between = marker not in (START, CHANNEL)
        self._header = "" if self._is_between else marker
        return True

    def _tell_body(self, events: list[Event], text: str) -> None:
        if not text:
            return
        if self._kind is None:
            events.append(CallArguments(self._num_calls, text))
        elif self._has_text:
            events.append(self._kind(text))
        else:
            self._tell(events, self._kind, text)
        self._has_text = True

    def _end_body(self, events: list[Event]) -> None:
        if self._kind is None:
            if not self._has_text:
                events.append(CallArguments(self._num_calls, "{}"))
            self._num_calls += 1
        self._in_body = False
        self._kind = Content

    def _tell(self, events: list[Event], kind: type[Reasoning] | type[Content], text: str) -> None:
        """The first text of a message."""
        if text:
            events.append(kind("\n" + text if kind in self._told else text))
            self._told.add(kind)
