"""The built-in formats of tool calls by name; `shared/parser_names.py` lists the same names."""

from collections.abc import Mapping
from typing import Final

from tokenmesh.services.gateway.parsers import harmony
from tokenmesh.services.gateway.parsers.formats import ToolFormat
from tokenmesh.services.gateway.parsers.tools import (
    gemma,
    glm,
    headed,
    json_families,
    markup,
    mistral,
    pythonic,
)

TOOLS: Final[Mapping[str, ToolFormat]] = {
    "apertus": json_families.APERTUS,
    "cohere_command3": json_families.COHERE_COMMAND3,
    "deepseek_v3": headed.DEEPSEEK_V3,
    "deepseek_v31": headed.DEEPSEEK_V31,
    "deepseek_v32": markup.DEEPSEEK_V32,
    "deepseek_v4": markup.DEEPSEEK_V32,
    "dots": markup.DOTS,
    "ernie45": json_families.HERMES,
    "functiongemma": gemma.FUNCTIONGEMMA,
    "gemma4": gemma.GEMMA4,
    "gigachat3": json_families.GIGACHAT3,
    "glm45": glm.GLM,
    "glm47": glm.GLM,
    "granite": json_families.GRANITE,
    "granite-20b-fc": json_families.GRANITE_20B_FC,
    "granite4": json_families.HERMES,
    "hermes": json_families.HERMES,
    "hunyuan_a13b": json_families.JAMBA,
    "internlm": json_families.INTERNLM,
    "jamba": json_families.JAMBA,
    "kimi_k2": headed.KIMI_K2,
    "lfm2": pythonic.LFM2,
    "ling3": glm.GLM,
    "llama3_json": json_families.LLAMA_JSON,
    "llama4_json": json_families.LLAMA_JSON,
    "llama4_pythonic": pythonic.LLAMA4_PYTHONIC,
    "longcat": json_families.LONGCAT,
    "mimo": markup.MIMO,
    "minimax_m2": markup.MINIMAX_M2,
    "mistral": mistral.MISTRAL,
    "olmo3": pythonic.OLMO3,
    "openai": harmony.OPENAI,
    "phi4_mini_json": json_families.PHI4_MINI,
    "pythonic": pythonic.PYTHONIC,
    "qwen3_coder": markup.QWEN3_CODER,
    "qwen3_xml": markup.QWEN3_CODER,
    "seed_oss": markup.SEED_OSS,
    "step3": markup.STEP3,
    "step3p5": markup.QWEN3_CODER,
    "xlam": json_families.XLAM,
}
