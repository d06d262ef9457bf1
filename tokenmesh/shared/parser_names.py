"""The names of the built-in parsers: the values of the settings of parsers.

The gateway's tables hold exactly these (a test compares them).
"""

import ast
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import ConfigError

REASONING_PARSERS: Final = (
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "deepseek_v41",
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
TOOL_PARSERS: Final = (
    "apertus",
    "cohere_command3",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "dots",
    "ernie45",
    "functiongemma",
    "gemma4",
    "gigachat3",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hunyuan_a13b",
    "internlm",
    "jamba",
    "kimi_k2",
    "lfm2",
    "ling3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minimax_m2",
    "mistral",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "step3",
    "step3p5",
    "xlam",
)

FILE_TABLE: Final = "PARSERS"
"""The dictionary of a file of `gateway.parser_files`: formats by name, its keys written out."""


def names_in(path: str) -> tuple[str, ...]:
    """The parsers that a Python file brings, without running it.

    Raises ConfigError where it has no such dictionary.
    """
    what = f"it must define {FILE_TABLE} = {{name: format}}: see docs/guides/add-a-parser.md"
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes(), path)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"parser_files: {path}: {error}; {what}", param="parser_files") from error
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        is_table = any(isinstance(each, ast.Name) and each.id == FILE_TABLE for each in targets)
        value = getattr(node, "value", None)
        if is_table and isinstance(value, ast.Dict):
            keys = [each.value for each in value.keys if isinstance(each, ast.Constant)]
            if keys and all(isinstance(each, str) for each in keys):
                return tuple(map(str, keys))
    raise ConfigError(f"parser_files: {path} holds no parser; {what}", param="parser_files")
