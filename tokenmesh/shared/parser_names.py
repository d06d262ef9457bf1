"""The names of parsers in files of others; `built_in_parsers.py` has those of our own."""

import ast
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import ConfigError

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
