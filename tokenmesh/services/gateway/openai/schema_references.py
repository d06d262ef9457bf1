"""References of a JSON schema: each leads somewhere inside it, and no value would never end."""

from typing import Any, Final
from urllib.parse import unquote

_SHOWN: Final = 60


def check_references(schema: dict[str, Any]) -> None:
    """Raises ValueError for a reference to nothing, or a value that has to hold itself."""
    _check_targets(schema)
    _check_endings(schema)


def _check_targets(schema: dict[str, Any]) -> None:
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                _resolve(schema, node["$ref"])
            nodes.extend(node.values())
        elif isinstance(node, list):
            nodes.extend(node)


def _resolve(schema: dict[str, Any], reference: str) -> Any:
    """What a reference means, the schema itself for `#`."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(
            f"$ref {reference[:_SHOWN]!r} leads outside: only #/... within the schema is followed"
        )
    node: Any = schema
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise ValueError(f"$ref {reference[:_SHOWN]!r} leads nowhere")
    return node


def _check_endings(schema: dict[str, Any]) -> None:
    """Depth first along what a value must hold: a way back to where it began never ends."""
    is_done: dict[int, bool] = {}
    starts: list[Any] = [schema]
    stack: list[tuple[Any, bool]] = [(start, False) for start in starts]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            is_done[id(node)] = True
            continue
        state = is_done.get(id(node))
        if state is False:
            raise ValueError("$ref: a value has to hold another of its own kind, without end")
        if state or not isinstance(node, dict):
            continue
        is_done[id(node)] = False
        stack.append((node, True))
        stack.extend((each, False) for each in _must_hold(schema, node))


def _must_hold(schema: dict[str, Any], node: dict[str, Any]) -> list[Any]:
    """Schemas of which every value of `node` holds, or is, a value."""
    if isinstance(node.get("$ref"), str):
        return [_resolve(schema, node["$ref"])]
    held = list(_as_list(node.get("allOf")))
    for name in ("anyOf", "oneOf"):
        branches = _as_list(node.get(name))
        held += branches if len(branches) == 1 else []
    kind = node.get("type")
    properties = node.get("properties")
    if kind == "object" and isinstance(properties, dict):
        required = _as_list(node.get("required"))
        held += [properties[name] for name in required if _is_key(name, properties)]
    if kind == "array" and isinstance(node.get("minItems"), int) and node["minItems"] > 0:
        held += [node["items"]] if "items" in node else []
    return held


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_key(name: object, properties: dict[str, Any]) -> bool:
    return isinstance(name, str) and name in properties
