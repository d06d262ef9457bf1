"""Apertus: <|tools_prefix|>[{"name": {arguments}}, ...]<|tools_suffix|>, the name being the key."""

from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.json_calls import copy_arguments
from tokenmesh.services.gateway.parsers.tools.json_value import read_string
from tokenmesh.services.gateway.parsers.tools.script_parser import tool_format
from tokenmesh.services.gateway.parsers.tools.sections import Layout, sections
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream

_LAYOUT: Final = Layout(calls=("<|tools_prefix|>",), ends=("<|tools_suffix|>",))
_STOPS: Final = Markers(*_LAYOUT.calls, *_LAYOUT.ends)


def _read_calls(stream: CharStream) -> Steps[None]:
    before = stream.num_calls
    while True:
        came = stream.num_calls > before
        stream.keep()
        char = yield from stream.skip_space()
        if char == "{":
            if not (yield from _read_call(stream)):
                break
        elif char and char in ("],;" if came else "["):
            stream.take(1)
            if char == "]":
                stream.drop_kept()
                return
        else:
            break
    if stream.num_calls > before and (yield from stream.at(_STOPS)):
        stream.drop_kept()
    stream.give_back()


def _read_call(stream: CharStream) -> Steps[bool]:
    """Takes {"name": {}}; False when it is none, or breaks off."""
    stream.take(1)
    if (yield from stream.skip_space()) != '"':
        return False
    name = yield from read_string(stream)
    if (yield from stream.skip_space()) != ":" or not name:
        return False
    stream.take(1)
    if (yield from stream.skip_space()) != "{":
        return False
    stream.begin_call(name)
    if not (yield from copy_arguments(stream, stream.arguments, _STOPS)):
        return False
    stream.keep()
    if (yield from stream.skip_space()) != "}":
        return False
    stream.take(1)
    stream.drop_kept()
    return True


_SCRIPT: Final = sections(_LAYOUT, _read_calls)
APERTUS: Final = tool_format(lambda context: _SCRIPT)
