"""Finds the keys of config.json that transformers reads: fields, and names in its source."""

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from types import ModuleType
from typing import Any, Final, TypeGuard

from transformers import GenerationConfig, cache_utils, configuration_utils, masking_utils
from transformers import modeling_rope_utils as rope_utils

_SHARED: Final = (cache_utils, masking_utils)
"""Read the configuration of any model."""
_CALLS: Final = frozenset({"getattr", "hasattr"})
_LOOKUPS: Final = frozenset({"pop", "get", "setdefault"})


def keys_read(config_class: Any, modeling: ModuleType) -> set[str]:
    """Everything that may be a key, and some names that are not."""
    keys = {field.name for field in dataclasses.fields(config_class)}
    for module in (modeling, *_SHARED):
        keys |= _attributes(module)
    for owner in (config_class, configuration_utils.PreTrainedConfig.__post_init__):
        keys |= _lookups(inspect.getsource(owner))
    keys |= _lookups(inspect.getsource(rope_utils.RotaryEmbeddingConfigMixin))
    return {key for key in keys if not key.startswith("_")}


def rope_keys() -> set[str]:
    """Keys of a rope object."""
    return set(rope_utils.RopeParameters.__annotations__)


def generation_keys() -> set[str]:
    """Keys of a generation_config.json."""
    keys = set(vars(GenerationConfig())) | set(GenerationConfig._get_default_generation_params())
    return {key for key in keys if not key.startswith("_")}


@cache
def _attributes(module: ModuleType) -> set[str]:
    """`config.x`, `self.config.x` and `getattr(config, "x")`, for values that are no methods."""
    tree = ast.parse(inspect.getsource(module))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called and _is_config(node.value):
            found.add(node.attr)
        if _is_lookup(node) and _is_config(node.args[0]):
            found |= _strings(node.args[1:2])
    return found


def _is_config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.endswith("config")


def _lookups(source: str) -> set[str]:
    """`kwargs.pop("x")`, `getattr(self, "x")` and the like in a configuration class."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if not isinstance(node, ast.Call):
            continue
        of_kwargs = isinstance(node.func, ast.Attribute) and node.func.attr in _LOOKUPS
        if of_kwargs and getattr(node.func.value, "id", "") == "kwargs":  # type: ignore[attr-defined]
            found |= _strings(node.args[:1])
        if _is_lookup(node):
            found |= _strings(node.args[1:2])
    return found


def _is_lookup(node: ast.AST) -> TypeGuard[ast.Call]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return node.func.id in _CALLS


def _strings(nodes: list[ast.expr]) -> set[str]:
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
