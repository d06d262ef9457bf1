"""The formats whose calls are JSON objects with a "name": marker, object or array, end marker.

Where vLLM makes everything content because one call of a block is no JSON, the calls before that
one and the broken one itself, if its name had come, are calls here: a stream cannot take them back.
"""

from typing import Final

from tokenmesh.services.gateway.parsers.formats import CallFrame, ToolFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.json_calls import CallShape, read_calls
from tokenmesh.services.gateway.parsers.tools.script_parser import tool_format
from tokenmesh.services.gateway.parsers.tools.sections import Layout, sections
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script


def json_format(
    *begins: str,
    ends: tuple[str, ...] = (),
    first: str = "",
    name_key: str = "name",
    needs_arguments: bool = False,
    needs_special_tokens: bool = True,
    frame: CallFrame | None = None,
) -> ToolFormat:
    """Calls after a begin marker; without end markers the JSON itself ends them.

    Where the text begins with the character `first`, and with no marker, there are calls too.
    """
    stops = Markers(*begins, *ends) if ends else None
    shape = CallShape(ends=stops, name_key=name_key, needs_arguments=needs_arguments)
    script = sections(Layout(calls=begins, ends=ends), lambda stream: read_calls(stream, shape))
    if first:
        script = _from_start(first, Markers(*begins), script)
    return tool_format(
        lambda context: script, needs_special_tokens=needs_special_tokens, frame=frame
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
    """One object between two tags, on lines of their own."""
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
"""3.0 writes a turn of its own, 3.1 a token."""

GRANITE: Final = json_format("<|tool_call|>", "<tool_call>")

GRANITE_20B_FC: Final = json_format("<function_call>")

JAMBA: Final = json_format("<tool_calls>", ends=("</tool_calls>",))
"""Also Hunyuan A13B."""

INTERNLM: Final = json_format("<|action_start|><|plugin|>", ends=("<|action_end|>",))

PHI4_MINI: Final = json_format("functools", needs_special_tokens=False)

LLAMA_JSON: Final = json_format("<|python_tag|>", first="{")
"""Llama 3 and 4. A "{" further on in the text begins no call, as in vLLM's streams."""

XLAM: Final = json_format(
    "```json",
    "```",
    "[TOOL_CALLS]",
    "<tool_call>",
    ends=("</tool_call>", "```"),
    first="[",
    needs_arguments=True,
    needs_special_tokens=False,
)
