"""Reasoning formats from their markers: what the tables of families are made with."""

from typing import Literal

from tokenmesh.services.gateway.parsers.formats import ReasoningFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.prompt_tail import is_open
from tokenmesh.services.gateway.parsers.reasoning.block import BlockParser
from tokenmesh.services.gateway.parsers.reasoning.blocks import BlocksParser

Unmarked = Literal["answer", "reasoning", "reasoning_unless_off"]


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

    by_default: whether the model reasons when neither prompt nor request say.
    unmarked: what text without a start marker is, when the prompt says nothing either.
    calls: markers of tool calls, which end a block too where the request has tools.
    """
    first, closing = Markers(*starts), Markers(*ends)
    closing_or_call = Markers(*ends, *calls)

    def begins(context: ParseContext) -> bool:
        opened = is_open(context, starts, ends)
        if opened is not None:
            return opened
        if context.thinking is not None and unmarked != "reasoning":
            return context.thinking
        return by_default

    def make(context: ParseContext) -> Parser:
        opened = is_open(context, starts, ends)
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
        opened = is_open(context, (start,), (end,))
        if opened is not None:
            return opened
        return by_default if context.thinking is None else context.thinking

    def make(context: ParseContext) -> Parser:
        return BlocksParser(starts, ends, is_open(context, (start,), (end,)) is True)

    return ReasoningFormat(make=make, begins=begins, start=start, end=end)
