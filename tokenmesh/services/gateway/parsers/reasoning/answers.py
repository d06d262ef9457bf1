"""Families that put markers around the answer as well."""

from dataclasses import replace

from tokenmesh.services.gateway.parsers.chain import Chain
from tokenmesh.services.gateway.parsers.formats import ReasoningFormat
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.reasoning.formats import block_format
from tokenmesh.services.gateway.parsers.reasoning.wrapped import WrappedParser


def wrapped(
    block: ReasoningFormat, starts: tuple[str, ...], ends: tuple[str, ...]
) -> ReasoningFormat:
    """A block, and then an answer between two more markers."""
    first, last = Markers(*starts), Markers(*ends)

    def make(context: ParseContext) -> Parser:
        return Chain(block.make(context), WrappedParser(first, last))

    return replace(block, make=make)


HUNYUAN_A13B = wrapped(
    block_format(
        ("<think>", "<think>\n"),
        ("</think>", "\n</think>", "\n</think>\n", "</think>\n"),
        needs_special_tokens=False,
    ),
    ("<answer>", "<answer>\n"),
    ("</answer>", "\n</answer>"),
)
ERNIE45 = wrapped(
    block_format(ends=("</think>", "</think>\n", "</think>\n\n"), unmarked="reasoning"),
    ("<response>", "<response>\n"),
    ("</response>", "\n</response>", "\n</response>\n", "</response>\n"),
)
_COHERE = block_format(("<|START_THINKING|>",), ("<|END_THINKING|>",), calls=("<|START_ACTION|>",))
COHERE_COMMAND3 = wrapped(_COHERE, ("<|START_RESPONSE|>",), ("<|END_RESPONSE|>",))
COHERE_COMMAND4 = wrapped(
    _COHERE, ("<|START_TEXT|>", "<|START_RESPONSE|>"), ("<|END_TEXT|>", "<|END_RESPONSE|>")
)
