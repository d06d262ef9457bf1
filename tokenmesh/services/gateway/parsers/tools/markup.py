"""Calls in tags: <function=name><parameter=key>value</parameter></function> and its relatives.

A value ends at its end tag; models lose those, so it also ends where the next parameter begins or
the call ends (as in vLLM). Between parameters anything but white space ends the call, and is
content.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext, ToolSchema
from tokenmesh.services.gateway.parsers.tools.sections import Layout, sections
from tokenmesh.services.gateway.parsers.tools.source import Steps
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script
from tokenmesh.services.gateway.parsers.tools.typed_arguments import STRING, Trim, TypedArguments

_TAG_END: Final = Markers(">", "\n")
_CUT_NAME: Final = re.compile(r"""^\s*(?:name=)?["']?""")
_ANY: Final = frozenset({"any"})
"""No type: whatever JSON the text is, else a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkupFormat:
    """A family of this kind. Tags are given without what varies: `<function=`, then a name, `>`."""

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    attributes: re.Pattern[str]
    """What stands between a tag's beginning and its ">": a name, in group 1; in group 2, if there
    is one, whether a parameter is a string."""
    sections: tuple[str, ...] = ()
    section_ends: tuple[str, ...] = ()
    trim: Trim = Trim.NOTHING


def markup_script(markup: MarkupFormat) -> Callable[[ParseContext], Script]:
    """The script of a family, for a request whose tools have the types of the values."""
    layout = Layout(
        calls=(markup.call,),
        ends=(markup.call_end, *markup.section_ends),
        sections=markup.sections,
    )
    reader = _Reader(markup)

    def for_request(context: ParseContext) -> Script:
        return sections(layout, lambda stream: reader.read_call(stream, context.tools))

    return for_request


class _Reader:
    __slots__ = ("_inside", "_markup", "_value_ends")

    def __init__(self, markup: MarkupFormat) -> None:
        self._markup = markup
        self._inside = Markers(markup.parameter, markup.call_end)
        self._value_ends = Markers(markup.parameter_end, markup.parameter, markup.call_end)

    def read_call(self, stream: CharStream, tools: tuple[ToolSchema, ...]) -> Steps[None]:
        tag, _ = yield from self._tag(stream)
        name = tag.group(1) if tag is not None else ""
        if len(name.split()) != 1:
            stream.give_back()
            return
        stream.begin_call(name)
        arguments = TypedArguments(stream, tools, name)
        while True:
            yield from stream.skip_space()
            marker = yield from stream.at(self._inside)
            if marker != self._markup.parameter:
                break
            yield from self._parameter(stream, arguments)
        if not stream.drop_cut(self._markup.parameter, self._markup.call_end):
            arguments.end()

    def _parameter(self, stream: CharStream, arguments: TypedArguments) -> Steps[None]:
        stream.keep()
        stream.take(len(self._markup.parameter))
        tag, text = yield from self._tag(stream)
        if tag is None:
            if stream.is_over:
                arguments.cut(_CUT_NAME.sub("", text))
                stream.drop_kept()
            stream.give_back()
            return
        stream.drop_kept()
        arguments.begin(tag.group(1))
        types = arguments.types(tag.group(1))
        if tag.re.groups > 1 and tag.group(2):
            types = STRING if tag.group(2) == "true" else _ANY
        end = yield from arguments.copy_value(types, self._value_ends, self._markup.trim)
        if end == self._markup.parameter_end:
            stream.take(len(end))

    def _tag(self, stream: CharStream) -> Steps[tuple[re.Match[str] | None, str]]:
        """Takes the rest of a tag: its attributes, None when it is no tag; and its text."""
        text, end = yield from stream.read_until(_TAG_END)
        found = self._markup.attributes.fullmatch(text) if end == ">" else None
        if found is not None:
            stream.take(len(end))
        return found, text
