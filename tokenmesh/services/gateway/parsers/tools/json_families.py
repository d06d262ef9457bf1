"""Families whose calls are JSON objects with a "name" between markers; and Apertus, where the name
is the key: <|tools_prefix|>[{"name": {arguments}}, ...]<|tools_suffix|>.

If one call of a block is not valid JSON, vLLM makes the whole block content. Here the calls before
it, and the broken one if its name is complete, are calls: a stream cannot take them back.
"""

from typing import Final

from tokenmesh.services.gateway.parsers.formats import BareCalls, CallFrame, ToolFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.json_calls import (
    CallShape,
    copy_arguments,
    read_calls,
)
from tokenmesh.services.gateway.parsers.tools.json_value import read_string
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps


def json_format(
    *begins: str,
    ends: tuple[str, ...] = (),
    first: str = "",
    name_key: str = "name",
    needs_arguments: bool = False,
    needs_special_tokens: bool = True,
    frame: CallFrame | None = None,
    bare: BareCalls | None = None,
) -> ToolFormat:
    """Calls after a begin marker; without end markers the JSON ends them.

    With `first`, a text that begins with that character instead of a marker holds calls, too.
    """
    stops = Markers(*begins, *ends) if ends else None
    shape = CallShape(ends=stops, name_key=name_key, needs_arguments=needs_arguments)
    script = sections(Layout(calls=begins, ends=ends), lambda stream: read_calls(stream, shape))
    if first:
        script = _from_start(first, Markers(*begins), script)
    return tool_format(
        lambda context: script,
        needs_special_tokens=needs_special_tokens,
        frame=frame,
        bare=bare,
        begins=begins,
    )


def _from_start(first: str, begins: Markers, rest: Script) -> Script:
    shape = CallShape(needs_arguments=True)

    def script(stream: CharStream) -> Steps[None]:
        stream.keep()
        char = yield from stream.skip_space()
        if char == first and not (yield from stream.at(begins)):
            yield from read_calls(stream, shape)
        stream.give_back()
        yield from rest(stream)

    return script


def _tagged(begin: str, end: str) -> ToolFormat:
    """One object between two tags, each on a separate line."""
    frame = CallFrame(
        marker=begin, before='\n{"name": "', after='", "arguments": ', end=f"}}\n{end}"
    )
    return json_format(begin, ends=(end,), frame=frame)


HERMES: Final = _tagged("<tool_call>", "</tool_call>")
"""Also Granite 4 and Ernie 4.5."""

LONGCAT: Final = _tagged("<longcat_tool_call>", "</longcat_tool_call>")

COHERE_COMMAND3: Final = json_format(
    "<|START_ACTION|>", ends=("<|END_ACTION|>",), name_key="tool_name"
)

GIGACHAT3: Final = json_format(
    "<|message_sep|>\n\nfunction call<|role_sep|>\n",
    "function call<|role_sep|>\n",
    "<|function_call|>",
)
"""3.0 writes a separate turn, 3.1 a token."""

GRANITE: Final = json_format("<|tool_call|>", "<tool_call>")

GRANITE_20B_FC: Final = json_format("<function_call>")

JAMBA: Final = json_format("<tool_calls>", ends=("</tool_calls>",))
"""Also Hunyuan A13B."""

INTERNLM: Final = json_format("<|action_start|><|plugin|>", ends=("<|action_end|>",))

PHI4_MINI: Final = json_format("functools", needs_special_tokens=False)

LLAMA_JSON: Final = json_format(
    "<|python_tag|>",
    first="{",
    bare=BareCalls(arguments_key="parameters"),
)
"""Llama 3 and 4. A "{" later in the text does not begin a call, as in vLLM's streams."""

XLAM: Final = json_format(
    "```json",
    "```",
    "[TOOL_CALLS]",
    "<tool_call>",
    ends=("</tool_call>", "```"),
    first="[",
    needs_arguments=True,
    needs_special_tokens=False,
    bare=BareCalls(arguments_key="arguments", is_list=True),
)


_LAYOUT: Final = Layout(calls=("<|tools_prefix|>",), ends=("<|tools_suffix|>",))
_STOPS: Final = Markers(*_LAYOUT.calls, *_LAYOUT.ends)


def _read_calls(stream: CharStream) -> Steps[None]:
    before = stream.num_calls
    while True:
        has_calls = stream.num_calls > before
        stream.keep()
        char = yield from stream.skip_space()
        if char == "{":
            if not (yield from _read_call(stream)):
                break
        elif char and char in ("],;" if has_calls else "["):
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
    """Take {"name": {}}; False if it is something else or incomplete."""
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
APERTUS: Final = tool_format(lambda context: _SCRIPT, begins=_LAYOUT.calls)
