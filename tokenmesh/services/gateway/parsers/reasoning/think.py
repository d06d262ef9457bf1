"""Formats of one block between two markers: the many, told apart by their defaults only."""

from tokenmesh.services.gateway.parsers.formats import ReasoningFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.prompt_tail import is_open
from tokenmesh.services.gateway.parsers.reasoning.block import BlockParser


def block_format(
    start: str = "<think>",
    end: str = "</think>",
    *,
    by_default: bool,
    always: bool = False,
    also_ends: tuple[str, ...] = (),
) -> ReasoningFormat:
    """A format of one block.

    by_default: whether the model reasons when neither prompt nor request say.
    always: the model reasons, and writes no start marker, whatever the request says.
    also_ends: markers that end a block too, and belong to the answer.
    """
    ends = Markers(end, *also_ends)

    def begins(context: ParseContext) -> bool:
        opened = is_open(context, start, end)
        if opened is not None:
            return opened
        if context.thinking is not None and not always:
            return context.thinking
        return by_default

    def make(context: ParseContext) -> Parser:
        silent = is_open(context, start, end)
        return BlockParser(start, end, ends, begins=always if silent is None else silent)

    return ReasoningFormat(make=make, begins=begins, start=start, end=end)


DEEPSEEK_R1 = block_format(by_default=True, always=True)
DEEPSEEK_V3 = block_format(by_default=False)
QWEN3 = block_format(by_default=True, also_ends=("<tool_call>",))
