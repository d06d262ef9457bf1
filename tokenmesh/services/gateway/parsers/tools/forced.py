"""Parsers for answers that the grammar forces to be calls, whatever the model's own format is.

With `tool_choice: "required"` the model writes [{"name": ..., "parameters": {...}}, ...], with a
named function only its arguments. What is not that, which only a model without the constraint can
write, is content; the beginning of a call whose name was not complete is dropped.
"""

from tokenmesh.services.gateway.parsers.formats import MakeId
from tokenmesh.services.gateway.parsers.parser import Parser
from tokenmesh.services.gateway.parsers.tools.json_calls import (
    CallShape,
    copy_arguments,
    read_calls,
)
from tokenmesh.services.gateway.parsers.tools.script_parser import ScriptParser
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, copy_content


def required_calls(make_id: MakeId | None = None) -> Parser:
    """The parser of one choice with `tool_choice: "required"`."""
    shape = CallShape(make_id=make_id, drops_cut=True)

    def script(stream: CharStream) -> Steps[None]:
        stream.keep()
        if (yield from stream.skip_space()) == "[":
            yield from read_calls(stream, shape)
        stream.give_back()
        yield from copy_content(stream)

    return ScriptParser(script)


def named_call(name: str, make_id: MakeId | None = None) -> Parser:
    """The parser of one choice of which all is the arguments of that function."""

    def script(stream: CharStream) -> Steps[None]:
        if (yield from stream.skip_space()) == "{":
            stream.begin_call(name, None if make_id is None else make_id(0))
            yield from copy_arguments(stream, stream.arguments, None)
        yield from copy_content(stream)

    return ScriptParser(script)
