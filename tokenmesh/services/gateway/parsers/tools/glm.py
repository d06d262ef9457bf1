"""GLM 4.5 to 4.7: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>.

GLM 4.5 writes a newline after the name and between the pairs, 4.7 does not; both are read.
"""

import re
from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps
from tokenmesh.services.gateway.parsers.tools.typed_arguments import Trim, TypedArguments

_END: Final = "</tool_call>"
_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
_LAYOUT: Final = Layout(calls=("<tool_call>",), ends=(_END,))
_NAME: Final = re.compile(r"[^\s<>{}\[\]\"']+")
_INSIDE: Final = Markers(_KEY, _END)
_AFTER_KEY: Final = Markers(_KEY_END, _KEY, _END)
_BEFORE_VALUE: Final = Markers(_VALUE)
_AFTER_VALUE: Final = Markers(_VALUE_END, _KEY, _END)


def glm(context: ParseContext) -> Script:
    def read_call(stream: CharStream) -> Steps[None]:
        yield from stream.skip_space()
        name = yield from stream.read_while(_NAME)
        yield from stream.skip_space()
        if not name or not (yield from stream.at(_INSIDE)):
            stream.give_back()
            return
        stream.begin_call(name)
        arguments = TypedArguments(stream, context.tools, name)
        while (yield from stream.at(_INSIDE)) == _KEY:
            if not (yield from _pair(stream, arguments)):
                break
            yield from stream.skip_space()
        if not stream.drop_cut(_KEY, _END):
            arguments.end()

    return sections(_LAYOUT, read_call)


def _pair(stream: CharStream, arguments: TypedArguments) -> Steps[bool]:
    """Take a key and its value; False if it is incomplete. Other text is given back."""
    stream.keep()
    stream.take(len(_KEY))
    key, marker = yield from stream.read_until(_AFTER_KEY)
    if marker == _KEY_END:
        stream.take(len(marker))
        yield from stream.skip_space()
        marker = yield from stream.at(_BEFORE_VALUE)
    if marker != _VALUE or not key.strip():
        if stream.drop_cut(_VALUE):
            stream.drop_kept()
            arguments.cut(key.strip())
        stream.give_back()
        return False
    stream.take(len(marker))
    stream.drop_kept()
    key = key.strip()
    arguments.begin(key)
    end = yield from arguments.copy_value(arguments.types(key), _AFTER_VALUE, Trim.NOTHING)
    if end == _VALUE_END:
        stream.take(len(end))
    return bool(end)


GLM: Final = tool_format(glm)
