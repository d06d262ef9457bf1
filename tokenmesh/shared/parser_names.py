"""The names of the built-in parsers: what settings may say and a checkpoint may be told to use.

The gateway's tables hold exactly these (a test compares them).
"""

from typing import Final

REASONING_PARSERS: Final = ("deepseek_r1", "deepseek_v3", "qwen3")
TOOL_PARSERS: Final[tuple[str, ...]] = ()
