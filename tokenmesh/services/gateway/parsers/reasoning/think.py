"""Families that write `<think>` and `</think>`, told apart by their defaults."""

from typing import Final

from tokenmesh.services.gateway.parsers.reasoning.formats import block_format

_XML_CALL: Final = ("<tool_call>",)
_DSML_CALLS: Final = ("<\uff5cDSML\uff5ctool_calls>", "<\uff5cDSML\uff5cfunction_calls>")

DEEPSEEK_R1 = block_format(unmarked="reasoning")
DEEPSEEK_V3 = block_format(by_default=False)
DEEPSEEK_V4 = block_format(by_default=False, calls=_DSML_CALLS)
DEEPSEEK_V41 = block_format(by_default=False, calls=("<\uff5cDSML\uff5c calls>",))
GLM45 = block_format(unmarked="reasoning_unless_off", calls=_XML_CALL)
HOLO2 = block_format(unmarked="reasoning_unless_off")
KIMI_K2 = block_format(unmarked="reasoning_unless_off", calls=("<|tool_calls_section_begin|>",))
LING3 = block_format(by_default=False, calls=_XML_CALL)
MINIMAX_M2 = block_format(unmarked="reasoning", calls=("<minimax:tool_call>",))
OLMO3 = block_format(unmarked="reasoning", needs_special_tokens=False)
QWEN3 = block_format(calls=_XML_CALL)
STEP3 = block_format(unmarked="reasoning")

# The newlines around the end marker are the template's, not the model's.
STEP3P5 = block_format(
    ends=("</think>", "\n</think>\n", "\n</think>", "</think>\n"),
    unmarked="reasoning",
    calls=_XML_CALL,
)
GRANITE_THINKING = block_format(ends=("</think>", "</think>\n", "</think>\n\n"), calls=_XML_CALL)
