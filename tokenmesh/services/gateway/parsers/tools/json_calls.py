"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, the keys in any order.

A call begins when both its name and the key of its arguments have come; arguments that come before
the name are held back. Arguments that are a string are the JSON text in it; null, or an object with
a name and nothing else, are {}. Other members ("id", "type") of a call are skipped. An object that
ends without a name, or with other members instead of arguments, is given back as content; one that
breaks after that is a call with the arguments that came.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.gateway.parsers.formats import MakeId
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.json_value import (
    copy_container,
    copy_value,
    decode_string,
    read_string,
)
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """What is told of objects that are calls."""

    ends: Markers | None = None
    """Markers after the calls; a broken object stops there. None: the JSON itself ends them."""
    needs_arguments: bool = False
    """Formats without markers: many objects have a "name", only a call has arguments too."""
    name_key: str = "name"
    make_id: MakeId | None = None
    """The id of the call at that place, in families that need one of their own form."""
    drops_cut: bool = False
    """Where a grammar allows nothing but calls, text that ends within one is not content."""


class _Call:
    """One object: holds back what cannot be told before it is known to be a call."""

    __slots__ = ("_held", "_name", "_shape", "_stream", "has_arguments", "has_others", "is_begun")

    def __init__(self, stream: CharStream, shape: CallShape) -> None:
        self._stream = stream
        self._shape = shape
        self._name = ""
        self._held: list[str] = []
        self.is_begun = False
        self.has_arguments = False
        self.has_others = False

    def set_name(self, name: str) -> None:
        self._name = self._name or name
        self._begin_if_known()

    def begin_arguments(self) -> None:
        self.has_arguments = True
        self._begin_if_known()

    def write(self, text: str) -> None:
        if self.is_begun:
            self._stream.arguments(text)
        else:
            self._held.append(text)

    def end(self, is_complete: bool) -> None:
        is_bare = not (self.has_arguments or self.has_others or self._shape.needs_arguments)
        if self._name and is_bare:
            self._begin()
            self.write("{}" if is_complete else "")
        if not is_complete:
            _drop_cut(self._stream, self._shape)
        self._stream.give_back()

    def _begin_if_known(self) -> None:
        if self._name and self.has_arguments and not self.is_begun:
            self._begin()

    def _begin(self) -> None:
        make_id = self._shape.make_id
        model_id = make_id(self._stream.num_calls) if make_id is not None else None
        self._stream.begin_call(self._name, model_id)
        self._stream.arguments("".join(self._held))
        self.is_begun = True


def read_calls(stream: CharStream, shape: CallShape) -> Steps[None]:
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
    _drop_cut(stream, shape)
    stream.give_back()


def _drop_cut(stream: CharStream, shape: CallShape) -> None:
    if shape.drops_cut and stream.is_over:
        stream.drop_kept()


def _read_call(stream: CharStream, shape: CallShape) -> Steps[None]:
    stream.keep()
    call = _Call(stream, shape)
    is_complete = yield from _members(stream, call, shape)
    call.end(is_complete)


def _members(stream: CharStream, call: _Call, shape: CallShape) -> Steps[bool]:
    stream.take(1)
    while True:
        char = yield from stream.skip_space()
        if char == '"':
            # What breaks off in a member that is no part of the call is content.
            stream.keep()
            if not (yield from _member(stream, call, shape)):
                return False
            if call.is_begun:
                stream.drop_kept()
        elif char and char in ",}":
            stream.take(1)
            if char == "}":
                return True
        else:
            call.has_others = call.has_others or bool(char)
            return False


def _member(stream: CharStream, call: _Call, shape: CallShape) -> Steps[bool]:
    pieces: list[str] = []
    is_complete = yield from copy_container(stream, pieces.append, None)
    quoted = "".join(pieces)
    if not is_complete:
        call.has_others = not any(f'"{key}'.startswith(quoted) for key in ARGUMENT_KEYS)
        return False
    key = decode_string(quoted)
    if (yield from stream.skip_space()) != ":":
        call.has_others = key not in ARGUMENT_KEYS or not stream.is_empty
        return False
    stream.take(1)
    first = yield from stream.skip_space()
    if key == shape.name_key and first == '"':
        name = yield from read_string(stream)
        call.set_name(name or "")
        return name is not None
    if key in ARGUMENT_KEYS and not call.has_arguments:
        call.begin_arguments()
        return (yield from copy_arguments(stream, call.write, shape.ends))
    call.has_others = True
    return (yield from copy_value(stream, _skip, shape.ends))


def copy_arguments(
    stream: CharStream, write: Callable[[str], None], stops: Markers | None
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


def _copy_quoted(stream: CharStream, write: Callable[[str], None]) -> Steps[bool]:
    pieces: list[str] = []
    is_complete = yield from copy_container(stream, pieces.append, None)
    quoted = "".join(pieces)
    write(decode_string(quoted if is_complete else quoted + '"') or "{}")
    return is_complete


def _skip(text: str) -> None:
    """A member that is no part of the call."""
