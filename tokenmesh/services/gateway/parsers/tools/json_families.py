"""The formats whose calls are JSON objects with a "name": marker, object or array, end marker.

Where vLLM makes everything content because one call of a block is no JSON, the calls before that
one and the broken one itself, if its name had come, are calls here: a stream cannot take them back.
"""

from collections.abc import Callable
from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext
from tokenmesh.services.gateway.parsers.tools.json_calls import CallShape, read_calls
from tokenmesh.services.gateway.parsers.tools.script_parser import tool_format
from tokenmesh.services.gateway.parsers.tools.sections import Layout, sections
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import Script, Stream


def json_blocks(
    *begins: str, ends: tuple[str, ...] = (), needs_arguments: bool = False
) -> Callable[[ParseContext], Script]:
    """Calls after a begin marker; without end markers the JSON itself ends them."""
    stops = Markers(*begins, *ends) if ends else None
    shape = CallShape(ends=stops, needs_arguments=needs_arguments)
    script = sections(Layout(calls=begins, ends=ends), lambda stream: read_calls(stream, shape))
    return lambda context: script


def starting_with(
    first: str, rest: Callable[[ParseContext], Script]
) -> Callable[[ParseContext], Script]:
    """Calls without a marker where the text begins with that character; then as `rest` says."""
    shape = CallShape(needs_arguments=True)

    def for_request(context: ParseContext) -> Script:
        then = rest(context)

        def script(stream: Stream) -> Steps[None]:
            stream.keep()
            if (yield from stream.skip_space()) == first:
                yield from read_calls(stream, shape)
            stream.give_back()
            yield from then(stream)

        return script

    return for_request


HERMES: Final = tool_format(json_blocks("<tool_call>", ends=("</tool_call>",)))
"""Also Granite 4 and Ernie 4.5."""

GRANITE: Final = tool_format(json_blocks("<|tool_call|>", "<tool_call>"))

GRANITE_20B_FC: Final = tool_format(json_blocks("<function_call>"))

JAMBA: Final = tool_format(json_blocks("<tool_calls>", ends=("</tool_calls>",)))
"""Also Hunyuan A13B."""

INTERNLM: Final = tool_format(json_blocks("<|action_start|><|plugin|>", ends=("<|action_end|>",)))

PHI4_MINI: Final = tool_format(json_blocks("functools"), needs_special_tokens=False)

LLAMA_JSON: Final = tool_format(starting_with("{", json_blocks("<|python_tag|>")))
"""Llama 3 and 4. A "{" further on in the text begins no call, as in vLLM's streams."""

XLAM: Final = tool_format(
    starting_with(
        "[",
        json_blocks(
            "```json",
            "```",
            "[TOOL_CALLS]",
            "<tool_call>",
            ends=("</tool_call>",),
            needs_arguments=True,
        ),
    ),
    needs_special_tokens=False,
)
