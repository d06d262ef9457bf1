"""The built-in formats of tool calls; `shared/parser_names.py` lists the same names."""

from collections.abc import Mapping
from typing import Final

_PARSERS: Final = "tokenmesh.services.gateway.parsers"
_HERE: Final = f"{_PARSERS}.tools"

TOOLS: Final[Mapping[str, str]] = {
    "apertus": f"{_HERE}.apertus:APERTUS",
    "cohere_command3": f"{_HERE}.json_families:COHERE_COMMAND3",
    "deepseek_v3": f"{_HERE}.headed_families:DEEPSEEK_V3",
    "deepseek_v31": f"{_HERE}.headed_families:DEEPSEEK_V31",
    "deepseek_v32": f"{_HERE}.markup_families:DEEPSEEK_V32",
    "deepseek_v4": f"{_HERE}.markup_families:DEEPSEEK_V32",
    "dots": f"{_HERE}.markup_families:DOTS",
    "ernie45": f"{_HERE}.json_families:HERMES",
    "functiongemma": f"{_HERE}.gemma:FUNCTIONGEMMA",
    "gemma4": f"{_HERE}.gemma:GEMMA4",
    "gigachat3": f"{_HERE}.json_families:GIGACHAT3",
    "glm45": f"{_HERE}.glm:GLM",
    "glm47": f"{_HERE}.glm:GLM",
    "granite": f"{_HERE}.json_families:GRANITE",
    "granite-20b-fc": f"{_HERE}.json_families:GRANITE_20B_FC",
    "granite4": f"{_HERE}.json_families:HERMES",
    "hermes": f"{_HERE}.json_families:HERMES",
    "hunyuan_a13b": f"{_HERE}.json_families:JAMBA",
    "internlm": f"{_HERE}.json_families:INTERNLM",
    "jamba": f"{_HERE}.json_families:JAMBA",
    "kimi_k2": f"{_HERE}.headed_families:KIMI_K2",
    "lfm2": f"{_HERE}.pythonic:LFM2",
    "ling3": f"{_HERE}.glm:GLM",
    "llama3_json": f"{_HERE}.json_families:LLAMA_JSON",
    "llama4_json": f"{_HERE}.json_families:LLAMA_JSON",
    "llama4_pythonic": f"{_HERE}.pythonic:LLAMA4_PYTHONIC",
    "longcat": f"{_HERE}.json_families:LONGCAT",
    "mimo": f"{_HERE}.markup_families:MIMO",
    "minimax_m2": f"{_HERE}.markup_families:MINIMAX_M2",
    "mistral": f"{_HERE}.mistral:MISTRAL",
    "olmo3": f"{_HERE}.pythonic:OLMO3",
    "openai": f"{_PARSERS}.harmony.formats:OPENAI",
    "phi4_mini_json": f"{_HERE}.json_families:PHI4_MINI",
    "pythonic": f"{_HERE}.pythonic:PYTHONIC",
    "qwen3_coder": f"{_HERE}.markup_families:QWEN3_CODER",
    "qwen3_xml": f"{_HERE}.markup_families:QWEN3_CODER",
    "seed_oss": f"{_HERE}.markup_families:SEED_OSS",
    "step3": f"{_HERE}.markup_families:STEP3",
    "step3p5": f"{_HERE}.markup_families:QWEN3_CODER",
    "xlam": f"{_HERE}.json_families:XLAM",
}
