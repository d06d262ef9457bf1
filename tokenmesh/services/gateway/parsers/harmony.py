"""Harmony, the format of gpt-oss: every message has a header with its channel and recipient."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.parsers.formats import ReasoningFormat, ToolFormat
from tokenmesh.services.gateway.parsers.markers import MarkedText, Markers
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    ParseContext,
    Parser,
    Reasoning,
)

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"

_NOT_TOOLS: Final = frozenset({"", "all", "assistant", "user"})
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]*)")
_KNOWN: Final = re.compile(
    r"<\|(?:start|channel|constrain)\|>|\bto=[^\s<]*|\b(?:assistant|analysis|commentary|final|json)\b"
)


@dataclass(frozen=True, slots=True)
class HarmonyHeader:
    """The channel and the recipient of a message."""

    channel: str = ""
    recipient: str = ""
    """Empty: the user. Else the name of a tool."""


def read_header(text: str) -> HarmonyHeader:
    """Parse the text between a message's start and its `<|message|>`.

    The recipient may come before or after the channel, and a content type after both.
    """
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    to = recipient.group(1) if recipient is not None else ""
    return HarmonyHeader(
        channel.group(1) if channel is not None else "", "" if to in _NOT_TOOLS else to
    )


def stray_text(text: str) -> str:
    """The text in an unfinished header that does not belong to a header."""
    return _KNOWN.sub("", text).strip()


_FUNCTIONS: Final = "functions."
_LONGEST_HEADER: Final = 512
"""Characters; a longer header is text of a model that has left the format."""

_HEADER_BEGINS: Final = Markers(START, CHANNEL, CONSTRAIN, MESSAGE, "to=", END, CALL, RETURN)
_IN_HEADER: Final = Markers(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_IN_BODY: Final = Markers(START, CHANNEL, END, CALL, RETURN)
_OPENS: Final = frozenset({START, CHANNEL, CONSTRAIN, "to="})


class HarmonyParser:
    """Reads messages one after another; those of one kind are joined by a newline.

    A message to `functions.name` is a call. A message on the channel `analysis`, or to a recipient
    that is not a tool, is reasoning. All others are content.
    """

    def __init__(self, tools: Collection[str], header: str, has_body: bool) -> None:
        """`header`: the part of the first header in the prompt; `has_body`: it is complete."""
        self._tools = frozenset(tools)
        self._text = MarkedText()
        self._header = header
        self._is_between = not has_body and CHANNEL not in header
        self._in_body = False
        self._kind: type[Reasoning] | type[Content] | None = None
        self._written: set[type[Reasoning] | type[Content]] = set()
        self._num_calls = 0
        self._has_text = False
        self._begun: list[Event] = []
        if has_body:
            self._begin_body(self._begun)

    @property
    def is_reasoning(self) -> bool:
        return self._in_body and self._kind is Reasoning

    def push(self, text: str) -> list[Event]:
        self._text.push(text)
        return self._read()

    def finish(self) -> list[Event]:
        """The token that ends a call is usually not part of the text."""
        self._text.finish()
        events = self._read()
        if self._in_body:
            self._end_body(events)
        else:
            self._write(events, Content, stray_text(self._header))
        return events

    def _read(self) -> list[Event]:
        events, self._begun = self._begun, []
        while self._step(events):
            pass
        return events

    def _step(self, events: list[Event]) -> bool:
        """Read up to the next marker; False if there is none yet."""
        if self._in_body:
            return self._read_body(events)
        if self._is_between:
            return self._read_between(events)
        return self._read_header(events)

    def _read_between(self, events: list[Event]) -> bool:
        """Read the beginning of a message, where a header is expected."""
        marker = self._text.take_leading(_HEADER_BEGINS)
        if marker is None:
            return False
        self._is_between = False
        if marker:
            self._read_marker(events, marker)
        else:
            self._begin_plain()
        return True

    def _begin_plain(self) -> None:
        """Text without a header is content."""
        self._header = ""
        self._in_body = True
        self._kind = Content
        self._has_text = False

    def _read_header(self, events: list[Event]) -> bool:
        text, marker = self._text.take(_IN_HEADER)
        if len(self._header) + len(text) > _LONGEST_HEADER:
            self._write(events, Content, self._header)
            self._begin_plain()
            self._has_text = True
            self._text.give_back(text + (marker or ""))
            return True
        self._header += text
        if marker is not None:
            self._read_marker(events, marker)
        return marker is not None

    def _read_marker(self, events: list[Event], marker: str) -> None:
        """Handle a marker outside of a message's body."""
        if marker == START:
            self._write(events, Content, stray_text(self._header))
            self._header = START
        elif marker in _OPENS:
            self._header += f" {marker}"
        elif marker == MESSAGE:
            self._begin_body(events)
        else:
            self._write(events, Content, stray_text(self._header))
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
        self._write_body(events, text)
        if marker is None:
            return False
        self._end_body(events)
        self._is_between = marker not in (START, CHANNEL)
        self._header = "" if self._is_between else marker
        return True

    def _write_body(self, events: list[Event], text: str) -> None:
        if not text:
            return
        if self._kind is None:
            events.append(CallArguments(self._num_calls, text))
        elif self._has_text:
            events.append(self._kind(text))
        else:
            self._write(events, self._kind, text)
        self._has_text = True

    def _end_body(self, events: list[Event]) -> None:
        if self._kind is None:
            if not self._has_text:
                events.append(CallArguments(self._num_calls, "{}"))
            self._num_calls += 1
        self._in_body = False
        self._kind = Content

    def _write(self, events: list[Event], kind: type[Reasoning] | type[Content], text: str) -> None:
        """Write the first text of a message."""
        if text:
            events.append(kind("\n" + text if kind in self._written else text))
            self._written.add(kind)


def _make(context: ParseContext) -> Parser:
    header, message, _body = _unfinished(context.prompt_tail).partition(MESSAGE)
    return HarmonyParser([tool.name for tool in context.tools], header, bool(message))


def _unfinished(tail: str) -> str:
    """The message at the end of the prompt that the model continues."""
    begin = tail.rfind(START)
    begun = tail[begin:] if begin >= 0 else ""
    return "" if any(end in begun for end in (END, CALL, RETURN)) else begun


def _begins(context: ParseContext) -> bool:
    """Even an answer without reasoning follows the marker that ends reasoning."""
    return MESSAGE not in _unfinished(context.prompt_tail)


OPENAI = ToolFormat(make=_make, needs_special_tokens=True, reads_all=True)
OPENAI_GPTOSS = ReasoningFormat(
    make=_make,
    begins=_begins,
    start=f"{CHANNEL}analysis{MESSAGE}",
    end=f"{CHANNEL}final{MESSAGE}",
    other_ends=tuple(f"{CHANNEL}final {CONSTRAIN}{kind}{MESSAGE}" for kind in ("json", "JSON")),
    tools=OPENAI,
)
