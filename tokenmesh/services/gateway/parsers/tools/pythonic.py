"""Calls written as Python: [name(key=value, ...), name(...)], or one a line in Olmo 3.

Only keyword arguments are allowed, and a list counts only at the beginning of the text: "[1]" and
"[see](there)" are content. A value that is not a literal becomes a string with its source text.
Text after a call that is not a call is content.
"""

import re
from typing import Final

from tokenmesh.services.gateway.parsers.tools.python_literal import read_literal
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps, copy_content
from tokenmesh.services.gateway.parsers.tools.typed_arguments import TypedArguments

_WORD_CHARS: Final = re.compile(r"[\w.]+")
_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEY: Final = re.compile(r"[^\W\d]\w*")


def read_python_calls(stream: CharStream, is_list: bool) -> Steps[None]:
    """Take calls, and the brackets and commas of a list."""
    before = stream.num_calls
    while True:
        stream.keep()
        char = yield from stream.skip_space()
        has_calls = stream.num_calls > before
        if is_list and char == "]" and has_calls:
            stream.drop_kept()
            stream.take(1)
            return
        if is_list and char == ("," if has_calls else "["):
            stream.take(1)
            yield from stream.skip_space()
        if not (yield from _call(stream)):
            break
    stream.give_back()


def _call(stream: CharStream) -> Steps[bool]:
    """Take a call; False if there is none, or if no call can follow."""
    name = yield from stream.read_while(_WORD_CHARS)
    if not _NAME.fullmatch(name) or (yield from stream.peek()) != "(":
        return False
    stream.take(1)
    key = yield from _keyword(stream)
    if key is None:
        return False
    stream.begin_call(name)
    arguments = TypedArguments(stream, (), name)
    while key:
        arguments.begin(key)
        value, is_complete = yield from read_literal(stream)
        stream.arguments(value)
        if not is_complete:
            return False
        stream.keep()
        if (yield from stream.peek()) == ",":
            stream.take(1)
            key = yield from _keyword(stream)
        else:
            key = ""
        if key is not None:
            stream.drop_kept()
    return (yield from _end(stream, arguments))


def _end(stream: CharStream, arguments: TypedArguments) -> Steps[bool]:
    char = yield from stream.peek()
    if not char:
        arguments.cut(stream.pop_kept().lstrip(", \n"))
        return False
    arguments.end()
    if char != ")" or stream.is_keeping:
        return False
    stream.take(1)
    return True


def _keyword(stream: CharStream) -> Steps[str | None]:
    """Take `key=`; returns empty if a bracket ends the call, None if neither follows."""
    if (yield from stream.skip_space()) == ")":
        return ""
    key = yield from stream.read_while(_WORD_CHARS)
    char = yield from stream.skip_space()
    if not _KEY.fullmatch(key) or char != "=":
        return None
    stream.take(1)
    return key


def _starting_with_list(rest: Script) -> Script:
    def script(stream: CharStream) -> Steps[None]:
        stream.keep()
        if (yield from stream.skip_space()) == "[":
            yield from read_python_calls(stream, is_list=True)
        stream.give_back()
        yield from rest(stream)

    return script


def _blocks(begin: str, end: str, *, is_list: bool) -> Script:
    return sections(
        Layout(calls=(begin,), ends=(end,)), lambda stream: read_python_calls(stream, is_list)
    )


_PYTHONIC: Final = _starting_with_list(copy_content)
PYTHONIC: Final = tool_format(lambda context: _PYTHONIC, needs_special_tokens=False)

_LLAMA4: Final = _starting_with_list(_blocks("<|python_start|>", "<|python_end|>", is_list=True))
LLAMA4_PYTHONIC: Final = tool_format(lambda context: _LLAMA4)

_LFM2: Final = _blocks("<|tool_call_start|>", "<|tool_call_end|>", is_list=True)
LFM2: Final = tool_format(lambda context: _LFM2)

_OLMO3: Final = _blocks("<function_calls>", "</function_calls>", is_list=False)
OLMO3: Final = tool_format(lambda context: _OLMO3, needs_special_tokens=False)
