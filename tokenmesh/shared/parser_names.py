"""The names of the built-in parsers: what settings may say and a checkpoint may be told to use.

The gateway's tables hold exactly these (a test compares them).
"""

from typing import Final

REASONING_PARSERS: Final = (
    "cohere_command3",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "ernie45",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "granite_thinking_parser",
    "holo2",
    "hunyuan_a13b",
    "hy_v3",
    "k2_horizon",
    "kimi_k2",
    "ling3",
    "mimo",
    "minimax_m2",
    "minimax_m2_append_think",
    "minimax_m3",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "plamo3",
    "poolside_v1",
    "qwen3",
    "seed_oss",
    "step3",
    "step3p5",
)
TOOL_PARSERS: Final = ("openai",)
