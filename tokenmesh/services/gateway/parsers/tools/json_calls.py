"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, the keys in any order.

Arguments that come before the name are held back until it has come. Arguments that are a string
are the JSON text in it; null, or none at all, are {}. Other members ("id", "type") are skipped. An
object that ends without a name, or that is no object, is given back as content; one that breaks
after its name is a call with the arguments that came.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.json_value import (
    copy_container,
    copy_value,
    decode_string,
    read_string,
)
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import Stream

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """What is told of objects that are calls."""

    ends: Markers | None = None
    """Markers after the calls; a broken object stops there. None: the JSON itself ends them."""
    needs_arguments: bool = False
    """Formats without markers: any object may have a "name", only a call has arguments too."""
    make_id: Callable[[int], str] | None = None
    """The id of the call at that place, in families that need one of their own form."""


class _Call:
    """One object: holds back what cannot be told before the name."""

    __slots__ = ("_held", "_is_begun", "_name", "_shape", "_stream", "has_arguments")

    def __init__(self, stream: Stream, shape: CallShape) -> None:
        self._stream = stream
        self._shape = shape
        self._name = ""
        self._held: list[str] = []
        self._is_begun = False
        self.has_arguments = False

    def set_name(self, name: str) -> None:
        self._name = self._name or name
        self._begin_if_known()

    def begin_arguments(self) -> None:
        self.has_arguments = True
        self._begin_if_known()

    def write(self, text: str) -> None:
        if self._is_begun:
            self._stream.arguments(text)
        else:
            self._held.append(text)

    def end(self, is_complete: bool) -> bool:
        """Whether it was one."""
        if not self._is_begun:
            self._stream.give_back()
        elif is_complete and not self.has_arguments:
            self.write("{}")
        return self._is_begun

    def _begin_if_known(self) -> None:
        if self._is_begun or not self._name:
            return
        if self.has_arguments or not self._shape.needs_arguments:
            self._is_begun = True
            make_id = self._shape.make_id
            model_id = make_id(self._stream.num_calls) if make_id is not None else None
            self._stream.begin_call(self._name, model_id)
            self._stream.arguments("".join(self._held))


def read_calls(stream: Stream, shape: CallShape) -> Steps[None]:
    """Takes objects, one after the other or in an array, and what separates them.

    Leaves an end marker, and anything else that is neither, to the caller.
    """
    before = stream.num_calls
    while True:
        came = stream.num_calls > before
        stream.keep()
        char = yield from stream.skip_space()
        if char == "{":
            yield from _read_call(stream, shape)
        elif char and char in ("]},;" if came else "["):
            stream.take(1)
            if came and char in "]}":
                stream.drop_kept()
            if char == "]" and shape.ends is None:
                return
        else:
            break
    if came and shape.ends is not None and (yield from stream.at(shape.ends)):
        stream.drop_kept()
    stream.give_back()


def _read_call(stream: Stream, shape: CallShape) -> Steps[bool]:
    stream.keep()
    call = _Call(stream, shape)
    is_complete = yield from _members(stream, call, shape)
    return call.end(is_complete)


def _members(stream: Stream, call: _Call, shape: CallShape) -> Steps[bool]:
    stream.take(1)
    while True:
        char = yield from stream.skip_space()
        if char == '"':
            if not (yield from _member(stream, call, shape)):
                return False
        elif char and char in ",}":
            stream.take(1)
            if char == "}":
                return True
        else:
            return False


def _member(stream: Stream, call: _Call, shape: CallShape) -> Steps[bool]:
    key = yield from read_string(stream)
    if key is None or (yield from stream.skip_space()) != ":":
        return False
    stream.take(1)
    first = yield from stream.skip_space()
    if key == "name" and first == '"':
        name = yield from read_string(stream)
        call.set_name(name or "")
        return name is not None
    if key in ARGUMENT_KEYS and not call.has_arguments:
        call.begin_arguments()
        return (yield from copy_arguments(stream, call.write, shape.ends))
    return (yield from copy_value(stream, _skip, shape.ends))


def copy_arguments(
    stream: Stream, write: Callable[[str], None], stops: Markers | None
) -> Steps[bool]:
    """Copies the value that is a call's arguments; False when it broke off."""
    first = yield from stream.peek()
    if first == '"':
        return (yield from _copy_quoted(stream, write))
    if first in ("{", "["):
        return (yield from copy_container(stream, write, stops))
    pieces: list[str] = []
    is_complete = yield from copy_value(stream, pieces.append, stops)
    write("{}" if pieces == ["null"] else "".join(pieces))
    return is_complete


def _copy_quoted(stream: Stream, write: Callable[[str], None]) -> Steps[bool]:
    pieces: list[str] = []
    is_complete = yield from copy_container(stream, pieces.append, None)
    quoted = "".join(pieces)
    write(decode_string(quoted if is_complete else quoted + '"') or "{}")
    return is_complete


def _skip(text: str) -> None:
    """A member that is no part of the call."""
