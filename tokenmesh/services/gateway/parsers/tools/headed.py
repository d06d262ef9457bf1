"""Calls written as a header with the name, a separator, and the bare JSON of the arguments.

Arguments that are no JSON object are handed on as they are, up to the end marker; none are {}.
Text after a section is content (vLLM drops it for some of these families).
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.tools.json_calls import copy_arguments
from tokenmesh.services.gateway.parsers.tools.sections import Layout, sections
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script


@dataclass(frozen=True, slots=True)
class CallHeader:
    """What stands before the arguments."""

    name: str
    """Empty: this is no call."""
    model_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedFormat:
    """A family of this kind."""

    layout: Layout
    separator: str
    """Between a header and its arguments."""
    read_header: Callable[[str], CallHeader]


def headed_script(headed: HeadedFormat) -> Script:
    """The script of a family."""
    layout = headed.layout
    stops = Markers(*layout.calls, *layout.ends)
    in_header = Markers(headed.separator, *layout.sections, *layout.calls, *layout.ends)

    def read_call(stream: CharStream) -> Steps[None]:
        text, marker = yield from stream.read_until(in_header)
        header = headed.read_header(text.strip())
        if marker != headed.separator or not header.name:
            stream.give_back()
            return
        stream.take(len(marker))
        stream.begin_call(header.name, header.model_id)
        yield from copy_headed_arguments(stream, stops)

    return sections(layout, read_call)


def copy_headed_arguments(stream: CharStream, stops: Markers) -> Steps[None]:
    """The arguments of the call that has begun."""
    first = yield from stream.skip_space()
    if first in ("{", '"'):
        yield from copy_arguments(stream, stream.arguments, stops)
    elif (yield from stream.at(stops)):
        stream.arguments("{}")
    else:
        yield from stream.copy_until(stops, stream.arguments)
