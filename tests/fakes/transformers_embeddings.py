"""Finds code of transformers that changes embeddings where it makes them from token ids."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import transformers

_CONDITION = re.compile(r"inputs?_embeds is None|input_ids is not None")
_BRANCH = re.compile(r"( *)(?:el)?if (.*)")
_LOOKUP = re.compile(
    r"[\w.]+(\(\))?\((input=|input_ids=)?(\w*input\w*|decoder_input\w*)"
    r"(\.to\([\w.]+\))?\)(\.to\([\w.]+\))?"
)
"""A table that is asked for ids, and nothing else."""


def expressions_for_ids_alone() -> dict[str, set[str]]:
    """For each expression but a lookup that only a branch for ids applies to embeddings, the
    model types whose code has it."""
    found: dict[str, set[str]] = {}
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        for block in _branches(path.read_text().split("\n")):
            for expression in _expressions(block):
                if not _LOOKUP.fullmatch(expression):
                    found.setdefault(expression, set()).add(path.parent.name)
    return found


def _branches(lines: list[str]) -> Iterator[str]:
    """The blocks that run only without embeddings."""
    for first, line in enumerate(lines):
        if (branch := _BRANCH.match(line)) is None:
            continue
        indent, condition, end = len(branch[1]), branch[2], first + 1
        while not condition.rstrip().endswith(":") and end < len(lines):
            condition, end = condition + lines[end], end + 1
        if _CONDITION.search(condition):
            start = end
            while end < len(lines) and not lines[end][: indent + 1].strip():
                end += 1
            yield textwrap.dedent("\n".join(lines[start:end]))


def _expressions(block: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = ast.unparse(node.value)
            is_scaled = "input_ids)" in value and "*" in value
            if is_scaled or any("inputs_embeds" in ast.unparse(target) for target in targets):
                yield value
