"""Calls in tags: <function=name><parameter=key>value</parameter></function> and similar ones.

A value ends at its end tag, or, since models omit those, where the next parameter begins or the
call ends (as in vLLM). Between parameters any text except whitespace ends the call and is content.

GLM 4.5 to 4.7 write <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>,
4.5 with a newline after the name and between the pairs; both are read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenmesh.services.gateway.parsers.formats import ToolFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext, ToolSchema
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps
from tokenmesh.services.gateway.parsers.tools.typed_arguments import STRING, Trim, TypedArguments

_TAG_END: Final = Markers(">", "\n")
_NAME_PREFIX: Final = re.compile(r"""^\s*(?:name=)?["']?""")
_ANY: Final = frozenset({"any"})
"""No known type: valid JSON is kept, other text becomes a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkupFormat:
    """It says how a family writes such calls.

    Tags are given up to their attributes, as in `<function=`.
    """

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    attributes: re.Pattern[str]
    """The text between a tag's beginning and its ">". Group 1 is a name; group 2, if the pattern
    has one, says whether a parameter is a string."""
    sections: tuple[str, ...] = ()
    section_ends: tuple[str, ...] = ()
    trim: Trim = Trim.NOTHING


def markup_script(markup: MarkupFormat) -> Callable[[ParseContext], Script]:
    """Makes the script for a request, whose tools hold the types of the values."""
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
                arguments.cut(_NAME_PREFIX.sub("", text))
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
        """Take the rest of a tag: its attributes (None: it is not a tag), and its text."""
        text, end = yield from stream.read_until(_TAG_END)
        found = self._markup.attributes.fullmatch(text) if end == ">" else None
        if found is not None:
            stream.take(len(end))
        return found, text


_BAR: Final = "\N{FULLWIDTH VERTICAL LINE}"
_NAME: Final = re.compile(r"""\s*+["']?+(\s*+[^"'<>\s]++(?:\s++[^"'<>\s]++)*)["']?\s*""")
_DSML_NAME: Final = re.compile(r"""\s+name="([^"]+)"(?:\s+string="(true|false)")?\s*""")


def _markup(markup: MarkupFormat) -> ToolFormat:
    return tool_format(markup_script(markup), begins=(*markup.sections, markup.call))


def _qwen_like(prefix: str, trim: Trim = Trim.NEWLINE) -> ToolFormat:
    return _markup(
        MarkupFormat(
            call="<function=",
            call_end="</function>",
            parameter="<parameter=",
            parameter_end="</parameter>",
            attributes=_NAME,
            sections=(f"<{prefix}tool_call>",),
            section_ends=(f"</{prefix}tool_call>",),
            trim=trim,
        )
    )


QWEN3_CODER: Final = _qwen_like("")
"""Also Step 3.5 and what vLLM calls qwen3_xml."""

SEED_OSS: Final = _qwen_like("seed:")

MIMO: Final = _qwen_like("", trim=Trim.NOTHING)


def _invoke(section: str) -> ToolFormat:
    return _markup(
        MarkupFormat(
            call="<invoke name=",
            call_end="</invoke>",
            parameter="<parameter name=",
            parameter_end="</parameter>",
            attributes=_NAME,
            sections=(f"<{section}>",),
            section_ends=(f"</{section}>",),
        )
    )


MINIMAX_M2: Final = _invoke("minimax:tool_call")

DOTS: Final = _invoke("dots_function_call")

STEP3: Final = _markup(
    MarkupFormat(
        call="<steptml:invoke name=",
        call_end="</steptml:invoke>",
        parameter="<steptml:parameter name=",
        parameter_end="</steptml:parameter>",
        attributes=_NAME,
        sections=(
            f"<{_BAR}tool_calls_begin{_BAR}>",
            f"<{_BAR}tool_call_begin{_BAR}>function<{_BAR}tool_sep{_BAR}>",
        ),
        section_ends=(f"<{_BAR}tool_call_end{_BAR}>", f"<{_BAR}tool_calls_end{_BAR}>"),
        trim=Trim.SPACE,
    )
)

_DSML: Final = f"{_BAR}DSML{_BAR}"
DEEPSEEK_V32: Final = _markup(
    MarkupFormat(
        call=f"<{_DSML}invoke",
        call_end=f"</{_DSML}invoke>",
        parameter=f"<{_DSML}parameter",
        parameter_end=f"</{_DSML}parameter>",
        attributes=_DSML_NAME,
        sections=(f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        section_ends=(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
    )
)
"""Also DeepSeek V4, whose sections are tool_calls."""


_CALL_END: Final = "</tool_call>"
_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
_GLM: Final = Layout(calls=("<tool_call>",), ends=(_CALL_END,))
_FUNCTION: Final = re.compile(r"[^\s<>{}\[\]\"']+")
_GLM_INSIDE: Final = Markers(_KEY, _CALL_END)
_AFTER_KEY: Final = Markers(_KEY_END, _KEY, _CALL_END)
_BEFORE_VALUE: Final = Markers(_VALUE)
_AFTER_VALUE: Final = Markers(_VALUE_END, _KEY, _CALL_END)


def glm(context: ParseContext) -> Script:
    def read_call(stream: CharStream) -> Steps[None]:
        yield from stream.skip_space()
        name = yield from stream.read_while(_FUNCTION)
        yield from stream.skip_space()
        if not name or not (yield from stream.at(_GLM_INSIDE)):
            stream.give_back()
            return
        stream.begin_call(name)
        arguments = TypedArguments(stream, context.tools, name)
        while (yield from stream.at(_GLM_INSIDE)) == _KEY:
            if not (yield from _pair(stream, arguments)):
                break
            yield from stream.skip_space()
        if not stream.drop_cut(_KEY, _CALL_END):
            arguments.end()

    return sections(_GLM, read_call)


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


GLM: Final = tool_format(glm, begins=_GLM.calls)
