"""The schemas within a JSON schema, apart from the data in it.

Values of `const`, `enum`, `default` and `examples` are data: what looks like a keyword in them is
none.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

DATA: Final = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose values are data."""
LARK: Final = "lark"
"""A keyword of ours: the Lark grammar that a string follows."""
_BY_NAME: Final = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
"""Keywords whose values hold schemas by names, which are no keywords."""


def schema_nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object that is, or stands in the place of, a schema; the whole one first."""
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes.extend(node)
        elif isinstance(node, dict):
            yield node
            nodes.extend(_children(node))


def changed_schema(
    schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], by_name: bool = False
) -> Any:
    """A copy, each schema of which `change` has made of a copy with changed children.

    by_name: `schema` holds schemas by names.
    """
    if isinstance(schema, list):
        return [changed_schema(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if by_name:
        return {name: changed_schema(each, change) for name, each in schema.items()}
    copied = {
        name: each if name in DATA else changed_schema(each, change, name in _BY_NAME)
        for name, each in schema.items()
    }
    return change(copied)


def _children(node: dict[str, Any]) -> Iterator[Any]:
    for name, value in node.items():
        if name in DATA:
            continue
        if name in _BY_NAME and isinstance(value, dict):
            yield from value.values()
        else:
            yield value
