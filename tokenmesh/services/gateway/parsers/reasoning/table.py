"""The built-in formats of reasoning; `shared/parser_names.py` lists the same names."""

from collections.abc import Mapping
from typing import Final

_HERE: Final = "tokenmesh.services.gateway.parsers"

REASONING: Final[Mapping[str, str]] = {
    "cohere_command3": f"{_HERE}.reasoning.answers:COHERE_COMMAND3",
    "cohere_command4": f"{_HERE}.reasoning.answers:COHERE_COMMAND4",
    "deepseek_r1": f"{_HERE}.reasoning.think:DEEPSEEK_R1",
    "deepseek_v3": f"{_HERE}.reasoning.think:DEEPSEEK_V3",
    "deepseek_v4": f"{_HERE}.reasoning.think:DEEPSEEK_V4",
    "deepseek_v41": f"{_HERE}.reasoning.think:DEEPSEEK_V41",
    "ernie45": f"{_HERE}.reasoning.answers:ERNIE45",
    "gemma4": f"{_HERE}.reasoning.pairs:GEMMA4",
    "glm45": f"{_HERE}.reasoning.think:GLM45",
    "glm47": f"{_HERE}.reasoning.think:GLM45",
    "granite": f"{_HERE}.reasoning.pairs:GRANITE",
    "granite_thinking_parser": f"{_HERE}.reasoning.think:GRANITE_THINKING",
    "holo2": f"{_HERE}.reasoning.think:HOLO2",
    "hunyuan_a13b": f"{_HERE}.reasoning.answers:HUNYUAN_A13B",
    "hy_v3": f"{_HERE}.reasoning.think:DEEPSEEK_V3",
    "k2_horizon": f"{_HERE}.reasoning.pairs:K2_HORIZON",
    "kimi_k2": f"{_HERE}.reasoning.think:KIMI_K2",
    "ling3": f"{_HERE}.reasoning.think:LING3",
    "mimo": f"{_HERE}.reasoning.think:QWEN3",
    "minimax_m2": f"{_HERE}.reasoning.think:MINIMAX_M2",
    "minimax_m2_append_think": f"{_HERE}.reasoning.append_think:MINIMAX_M2_APPEND_THINK",
    "minimax_m3": f"{_HERE}.reasoning.pairs:MINIMAX_M3",
    "mistral": f"{_HERE}.reasoning.pairs:MISTRAL",
    "nemotron_v3": f"{_HERE}.reasoning.think:QWEN3",
    "olmo3": f"{_HERE}.reasoning.think:OLMO3",
    "openai_gptoss": f"{_HERE}.harmony.formats:OPENAI_GPTOSS",
    "plamo3": f"{_HERE}.reasoning.pairs:PLAMO3",
    "poolside_v1": f"{_HERE}.reasoning.think:DEEPSEEK_V3",
    "qwen3": f"{_HERE}.reasoning.think:QWEN3",
    "seed_oss": f"{_HERE}.reasoning.pairs:SEED_OSS",
    "step3": f"{_HERE}.reasoning.think:STEP3",
    "step3p5": f"{_HERE}.reasoning.think:STEP3P5",
}
