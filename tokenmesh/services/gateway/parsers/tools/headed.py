"""Calls written as a header with the name, a separator, and the arguments as JSON.

Arguments that are not a JSON object are passed on unchanged up to the end marker; missing ones are
{}. Text after a section is content (vLLM drops it for some of these families).

Mistral writes [TOOL_CALLS] before a JSON array of calls, or before a name and its arguments. The
second form, since tokenizer 11, is [TOOL_CALLS]name[ARGS]{...} with a marker for each call, an
optional [CALL_ID]id after the name, and an optional [ARGS]. Mistral's chat templates accept only
ids of nine letters and digits, so every call gets one: the model's, or one made from the choice's
seed and the call's index, which is the same when the answer is parsed again.
"""

import hashlib
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tokenmesh.services.gateway.parsers.formats import CallFrame, MakeId, ToolFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext
from tokenmesh.services.gateway.parsers.tools.json_calls import (
    CallShape,
    copy_arguments,
    read_calls,
)
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The parsed text before the arguments."""

    name: str
    """Empty: the text is not a call."""
    model_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadedFormat:
    """It says how a family writes such calls."""

    layout: Layout
    separator: str
    """Between a header and its arguments."""
    read_header: Callable[[str], CallHeader]


def headed_script(headed: HeadedFormat) -> Script:
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
    """Copy the arguments of the last call."""
    first = yield from stream.skip_space()
    if first in ("{", '"'):
        yield from copy_arguments(stream, stream.arguments, stops)
    elif (yield from stream.at(stops)):
        stream.arguments("{}")
    else:
        yield from stream.copy_until(stops, stream.arguments)


_BAR: Final = "\N{FULLWIDTH VERTICAL LINE}"
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_KIMI_ID: Final = re.compile(r"(?:functions\.)?([^\s:]+):\d+")


def _headed(headed: HeadedFormat, frame: CallFrame | None = None) -> ToolFormat:
    script = headed_script(headed)
    layout = headed.layout
    begins = (*layout.sections, *layout.calls)
    return tool_format(lambda context: script, frame=frame, begins=begins)


def _one_word(text: str) -> str:
    return text if len(text.split()) == 1 else ""


def _kimi_header(text: str) -> CallHeader:
    found = _KIMI_ID.fullmatch(text)
    if found is not None:
        return CallHeader(found.group(1), text)
    return CallHeader(_one_word(text.removeprefix("functions.")))


KIMI_K2: Final = _headed(
    HeadedFormat(
        layout=Layout(
            sections=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            calls=("<|tool_call_begin|>",),
            ends=(
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
                "<|tool_call_section_end|>",
            ),
        ),
        separator="<|tool_call_argument_begin|>",
        read_header=_kimi_header,
    )
)


def _token(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _SPACE)}{_BAR}>"


def _deepseek_layout(*more_ends: str) -> Layout:
    return Layout(
        sections=(_token("tool calls begin"),),
        calls=(_token("tool call begin"),),
        ends=(_token("tool call end"), _token("tool calls end"), *more_ends),
    )


def _deepseek_v3_header(text: str) -> CallHeader:
    kind, _, name = text.partition(_token("tool sep"))
    return CallHeader(_one_word(name.strip()) if kind == "function" else "")


DEEPSEEK_V3: Final = _headed(
    HeadedFormat(
        layout=_deepseek_layout("```"),
        separator="```json",
        read_header=_deepseek_v3_header,
    ),
    CallFrame(
        marker=_token("tool call begin"),
        before=f"function{_token('tool sep')}",
        after="\n```json\n",
        end=f"\n```{_token('tool call end')}",
        opening=_token("tool calls begin"),
        closing=_token("tool calls end"),
    ),
)
"""Has the call's type ("function") before its name, and the arguments in a code fence."""

DEEPSEEK_V31: Final = _headed(
    HeadedFormat(
        layout=_deepseek_layout(),
        separator=_token("tool sep"),
        read_header=lambda text: CallHeader(_one_word(text)),
    ),
    CallFrame(
        marker=_token("tool call begin"),
        before="",
        after=_token("tool sep"),
        end=_token("tool call end"),
        opening=_token("tool calls begin"),
        closing=_token("tool calls end"),
    ),
)


_CALLS: Final = "[TOOL_CALLS]"
_CALL_ID: Final = "[CALL_ID]"
_ARGS: Final = "[ARGS]"
_LAYOUT: Final = Layout(calls=(_CALLS,))
_STOPS: Final = Markers(_CALLS)
_NAME: Final = re.compile(r"[\w.:/-]+")
_ID: Final = re.compile(r"[A-Za-z0-9]+")
_AFTER_NAME: Final = Markers(_CALL_ID, _ARGS, "{")
_AFTER_ID: Final = Markers(_ARGS, "{")
_ALPHABET: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9


def call_id(seed: str, index: int) -> str:
    """Nine letters and digits for the call at that index of a choice."""
    digest = hashlib.blake2b(f"{index}:{seed}".encode("utf-8", "replace"), digest_size=_ID_CHARS)
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest.digest())


def make_ids(context: ParseContext) -> MakeId:
    """Call ids from the choice's seed."""
    return partial(call_id, context.seed)


def mistral(context: ParseContext) -> Script:
    make_id = make_ids(context)
    shape = CallShape(make_id=make_id)

    def read_call(stream: CharStream) -> Steps[None]:
        first = yield from stream.skip_space()
        if first in ("[", "{"):
            yield from read_calls(stream, shape)
            return
        name, model_id, is_call = yield from _header(stream)
        if not is_call:
            stream.give_back()
            return
        stream.begin_call(name, model_id or make_id(stream.num_calls))
        yield from copy_headed_arguments(stream, _STOPS)

    return sections(_LAYOUT, read_call)


def _header(stream: CharStream) -> Steps[tuple[str, str, bool]]:
    """The name, the id (may be empty), and whether arguments follow."""
    name = yield from stream.read_while(_NAME)
    model_id = ""
    yield from stream.skip_space()
    marker = yield from stream.at(_AFTER_NAME)
    if marker == _CALL_ID:
        stream.take(len(marker))
        model_id = yield from stream.read_while(_ID)
        yield from stream.skip_space()
        marker = yield from stream.at(_AFTER_ID)
    if marker == _ARGS:
        stream.take(len(marker))
    return name, model_id, bool(name and marker)


MISTRAL: Final = tool_format(mistral, make_ids=make_ids, begins=_LAYOUT.calls)
