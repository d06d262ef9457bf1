"""Families with markers of their own."""

from typing import Final

from tokenmesh.services.gateway.parsers.reasoning.formats import block_format, blocks_format

SEED_OSS = block_format(("<seed:think>",), ("</seed:think>",), calls=("<seed:tool_call>",))
MISTRAL = blocks_format("[THINK]", "[/THINK]", by_default=True)
MINIMAX_M3 = blocks_format("<mm:think>", "</mm:think>", by_default=False)
GEMMA4 = blocks_format("<|channel>thought\n", "<channel|>", by_default=False)
PLAMO3 = block_format(
    ("<|plamo:begin_think:plamo|>",),
    ("<|plamo:end_think:plamo|>",),
    unmarked="reasoning_unless_off",
)
# Quantized models shorten "is".
GRANITE = block_format(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    by_default=False,
    needs_special_tokens=False,
)

_IFM_CALLS: Final = ("<ifm|tool_calls>",)
# One pair for each effort, the highest first.
K2_HORIZON = block_format(
    ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
    calls=_IFM_CALLS,
)
