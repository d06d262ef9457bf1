"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, the keys in any order.

A call begins when both its name and the key of its arguments are read; arguments before the name
are held back. A string as arguments holds their JSON text; null, or an object with only a name,
means {}. Other members of a call ("id", "type") are skipped. An object without a name, or with
other members instead of arguments, is content. An object that breaks off after a call has begun is
a call with incomplete arguments.

With a forced call the grammar constrains the answer, for any format of the model: `required_calls`
reads [{"name": ..., "parameters": {...}}, ...], `named_call` only arguments. Other text, which only
a model without the constraint can write, is content. A call whose name is incomplete is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.gateway.parsers.formats import MakeId
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import Parser
from tokenmesh.services.gateway.parsers.tools.json_value import (
    copy_container,
    copy_value,
    decode_string,
    read_string,
)
from tokenmesh.services.gateway.parsers.tools.script import ScriptParser
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Steps, copy_content

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """It says how a family writes calls as objects."""

    ends: Markers | None = None
    """Markers after the calls, at which a broken object ends. None: the JSON ends them."""
    needs_arguments: bool = False
    """For formats without markers: an object with a "name" but no arguments is not a call."""
    name_key: str = "name"
    make_id: MakeId | None = None
    """Makes call ids, in families that need a special form."""
    drops_cut: bool = False
    """Drop a call whose beginning the end of the text cuts off; else it is content."""


class _Call:
    """One object: holds back its arguments until it is known to be a call."""

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
    """Take objects, one after another or in an array, and the separators.

    Leaves an end marker and any other text to the caller.
    """
    before = stream.num_calls
    while True:
        has_calls = stream.num_calls > before
        stream.keep()
        char = yield from stream.skip_space()
        if char == "{":
            yield from _read_call(stream, shape)
        elif char and char in ("]},;" if has_calls else "["):
            stream.take(1)
            if has_calls and char in "]}":
                stream.drop_kept()
            if char == "]" and shape.ends is None:
                return
        else:
            break
    if has_calls and shape.ends is not None and (yield from stream.at(shape.ends)):
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
            # A member that breaks off and is not part of the call is content.
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
    """Copy the value of a call's arguments; False if it is incomplete."""
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
    """Drop a member that is not part of the call."""


def required_calls(make_id: MakeId | None = None) -> Parser:
    """The parser of a choice with `tool_choice: "required"`."""
    shape = CallShape(make_id=make_id, drops_cut=True)

    def script(stream: CharStream) -> Steps[None]:
        stream.keep()
        if (yield from stream.skip_space()) == "[":
            yield from read_calls(stream, shape)
        stream.give_back()
        yield from copy_content(stream)

    return ScriptParser(script)


def named_call(name: str, make_id: MakeId | None = None) -> Parser:
    """The parser of a choice that consists of the arguments of that function."""

    def script(stream: CharStream) -> Steps[None]:
        if (yield from stream.skip_space()) == "{":
            stream.begin_call(name, None if make_id is None else make_id(0))
            yield from copy_arguments(stream, stream.arguments, None)
        yield from copy_content(stream)

    return ScriptParser(script)
