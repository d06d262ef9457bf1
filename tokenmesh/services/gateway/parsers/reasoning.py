"""The built-in formats of reasoning by name, made from their markers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal

from tokenmesh.services.gateway.parsers.blocks import (
    AppendThinkParser,
    BlockParser,
    BlocksParser,
    WrappedParser,
)
from tokenmesh.services.gateway.parsers.formats import Chain, ReasoningFormat
from tokenmesh.services.gateway.parsers.harmony import OPENAI_GPTOSS
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser

Unmarked = Literal["answer", "reasoning", "reasoning_unless_off"]


def _is_open(context: ParseContext, starts: Iterable[str], ends: Iterable[str]) -> bool | None:
    """Return whether the prompt leaves a block of reasoning open; None if it does not show.

    Only a marker at the very end of the prompt counts, since a user may have written others. If the
    prompt ends with the model's unfinished message, the last marker in it counts.
    """
    starts = tuple(start.strip() for start in starts)
    ends = tuple(end.strip() for end in ends)
    tail = context.prompt_tail.rstrip()
    if context.continues:
        began, ended = max(map(tail.rfind, starts)), max(map(tail.rfind, ends))
        return None if began == ended else began > ended
    if tail.endswith(starts):
        return True
    return False if tail.endswith(ends) else None


def block_format(
    starts: tuple[str, ...] = ("<think>",),
    ends: tuple[str, ...] = ("</think>",),
    *,
    by_default: bool = True,
    unmarked: Unmarked = "answer",
    calls: tuple[str, ...] = (),
    needs_special_tokens: bool = True,
) -> ReasoningFormat:
    """A format of one block at the beginning; of several markers the first is the usual one.

    by_default: whether the model reasons when neither the prompt nor the request decides it.
    unmarked: what text without a start marker is, if the prompt does not decide it.
    calls: markers of tool calls, which also end a block if the request has tools.
    """
    first, closing = Markers(*starts), Markers(*ends)
    closing_or_call = Markers(*ends, *calls)

    def begins(context: ParseContext) -> bool:
        opened = _is_open(context, starts, ends)
        if opened is not None:
            return opened
        if context.thinking is not None and unmarked != "reasoning":
            return context.thinking
        return by_default

    def make(context: ParseContext) -> Parser:
        opened = _is_open(context, starts, ends)
        if opened is None:
            is_off = unmarked == "reasoning_unless_off" and context.thinking is False
            opened = unmarked != "answer" and not is_off
        return BlockParser(first, closing_or_call if context.tools else closing, opened, calls)

    return ReasoningFormat(
        make=make,
        begins=begins,
        start=starts[0],
        end=ends[0],
        other_ends=tuple(end for end in ends if ends[0] not in end),
        calls=calls,
        needs_special_tokens=needs_special_tokens,
    )


def blocks_format(start: str, end: str, *, by_default: bool) -> ReasoningFormat:
    """A format of blocks anywhere; `by_default` as in `block_format`."""
    starts, ends = Markers(start), Markers(end)

    def begins(context: ParseContext) -> bool:
        opened = _is_open(context, (start,), (end,))
        if opened is not None:
            return opened
        return by_default if context.thinking is None else context.thinking

    def make(context: ParseContext) -> Parser:
        return BlocksParser(starts, ends, _is_open(context, (start,), (end,)) is True)

    return ReasoningFormat(make=make, begins=begins, start=start, end=end)


def wrapped_format(
    block: ReasoningFormat, starts: tuple[str, ...], ends: tuple[str, ...]
) -> ReasoningFormat:
    """A block, then an answer between two more markers."""
    first, last = Markers(*starts), Markers(*ends)

    def make(context: ParseContext) -> Parser:
        return Chain(block.make(context), WrappedParser(first, last))

    return replace(block, make=make)


_XML_CALL: Final = ("<tool_call>",)
_DSML_CALLS: Final = ("<\uff5cDSML\uff5ctool_calls>", "<\uff5cDSML\uff5cfunction_calls>")

_OFF: Final = block_format(by_default=False)
_XML: Final = block_format(calls=_XML_CALL)
_GLM: Final = block_format(unmarked="reasoning_unless_off", calls=_XML_CALL)
_COHERE: Final = block_format(
    ("<|START_THINKING|>",), ("<|END_THINKING|>",), calls=("<|START_ACTION|>",)
)

REASONING: Final[Mapping[str, ReasoningFormat]] = {
    "cohere_command3": wrapped_format(_COHERE, ("<|START_RESPONSE|>",), ("<|END_RESPONSE|>",)),
    "cohere_command4": wrapped_format(
        _COHERE, ("<|START_TEXT|>", "<|START_RESPONSE|>"), ("<|END_TEXT|>", "<|END_RESPONSE|>")
    ),
    "deepseek_r1": block_format(unmarked="reasoning"),
    "deepseek_v3": _OFF,
    "deepseek_v4": block_format(by_default=False, calls=_DSML_CALLS),
    "deepseek_v41": block_format(by_default=False, calls=("<\uff5cDSML\uff5c calls>",)),
    "ernie45": wrapped_format(
        block_format(ends=("</think>", "</think>\n", "</think>\n\n"), unmarked="reasoning"),
        ("<response>", "<response>\n"),
        ("</response>", "\n</response>", "\n</response>\n", "</response>\n"),
    ),
    "gemma4": blocks_format("<|channel>thought\n", "<channel|>", by_default=False),
    "glm45": _GLM,
    "glm47": _GLM,
    # Quantized models shorten "is".
    "granite": block_format(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        by_default=False,
        needs_special_tokens=False,
    ),
    "granite_thinking_parser": block_format(
        ends=("</think>", "</think>\n", "</think>\n\n"), calls=_XML_CALL
    ),
    "holo2": block_format(unmarked="reasoning_unless_off"),
    "hunyuan_a13b": wrapped_format(
        block_format(
            ("<think>", "<think>\n"),
            ("</think>", "\n</think>", "\n</think>\n", "</think>\n"),
            needs_special_tokens=False,
        ),
        ("<answer>", "<answer>\n"),
        ("</answer>", "\n</answer>"),
    ),
    "hy_v3": _OFF,
    # One pair for each effort, the highest first.
    "k2_horizon": block_format(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        calls=("<ifm|tool_calls>",),
    ),
    "kimi_k2": block_format(
        unmarked="reasoning_unless_off", calls=("<|tool_calls_section_begin|>",)
    ),
    "ling3": block_format(by_default=False, calls=_XML_CALL),
    "mimo": _XML,
    "minimax_m2": block_format(unmarked="reasoning", calls=("<minimax:tool_call>",)),
    "minimax_m2_append_think": ReasoningFormat(
        make=AppendThinkParser,
        begins=lambda _context: True,
        start=AppendThinkParser.start,
        end="</think>",
    ),
    "minimax_m3": blocks_format("<mm:think>", "</mm:think>", by_default=False),
    "mistral": blocks_format("[THINK]", "[/THINK]", by_default=True),
    "nemotron_v3": _XML,
    "olmo3": block_format(unmarked="reasoning", needs_special_tokens=False),
    "openai_gptoss": OPENAI_GPTOSS,
    "plamo3": block_format(
        ("<|plamo:begin_think:plamo|>",),
        ("<|plamo:end_think:plamo|>",),
        unmarked="reasoning_unless_off",
    ),
    "poolside_v1": _OFF,
    "qwen3": _XML,
    "seed_oss": block_format(("<seed:think>",), ("</seed:think>",), calls=("<seed:tool_call>",)),
    "step3": block_format(unmarked="reasoning"),
    # The newlines around the end marker are the template's, not the model's.
    "step3p5": block_format(
        ends=("</think>", "\n</think>\n", "\n</think>", "</think>\n"),
        unmarked="reasoning",
        calls=_XML_CALL,
    ),
}
