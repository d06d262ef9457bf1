"""The static limits of constraints: what is refused before anybody tries to compile it."""

import json
from typing import Any, Final

from tokenmesh.services.gateway.openai.regex_limits import check_regex
from tokenmesh.services.gateway.openai.schema_references import check_references
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured

_SHOWN: Final = 40


def check_structured(structured: Structured, limits: GatewaySettings) -> None:
    """Raises InvalidInput that names the constraint's field."""
    try:
        _check(structured, limits)
    except ValueError as error:
        raise InvalidInput(f"{structured.field}: {error}", param=structured.field) from error


def _check(structured: Structured, limits: GatewaySettings) -> None:
    text = structured.text
    if structured.whitespace_pattern is not None:
        check_regex(structured.whitespace_pattern, limits)
    if structured.kind == "json":
        _check_size(text, limits.max_schema_bytes)
        _check_schema(_parse(text), limits)
    elif structured.kind == "regex":
        check_regex(text, limits)
    elif structured.kind == "choice":
        _check_size(text, limits.max_schema_bytes)
        _check_choices(json.loads(text), limits)
    elif structured.kind == "grammar":
        _check_size(text, limits.max_grammar_bytes)
    elif structured.kind == "structural_tag":
        _check_size(text, limits.max_grammar_bytes)
        _check_tag(_parse(text), limits)


def _check_size(text: str, limit: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise ValueError(f"{num_bytes} bytes, at most {limit}")


def _parse(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("its JSON must be an object")
    return parsed


def _check_schema(schema: dict[str, Any], limits: GatewaySettings) -> None:
    _check_shape(schema, limits)
    check_references(schema)


def _check_shape(value: object, limits: GatewaySettings) -> None:
    """Number and nesting of a JSON value's parts, and the patterns among them."""
    level, num_nodes, depth = [value], 0, 0
    while level:
        num_nodes += len(level)
        if num_nodes > limits.max_schema_nodes:
            raise ValueError(f"it has more than {limits.max_schema_nodes} parts")
        if depth > limits.max_schema_depth:
            raise ValueError(f"it is nested more than {limits.max_schema_depth} deep")
        depth += 1
        below: list[object] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
                _check_pattern(each.get("pattern"), limits)
            elif isinstance(each, list):
                below.extend(each)
        level = below


def _check_pattern(pattern: object, limits: GatewaySettings) -> None:
    if isinstance(pattern, str):
        try:
            check_regex(pattern, limits)
        except ValueError as error:
            raise ValueError(f"pattern {pattern[:_SHOWN]!r}: {error}") from error


def _check_choices(choices: list[str], limits: GatewaySettings) -> None:
    if len(choices) > limits.max_structured_choices:
        raise ValueError(f"{len(choices)} choices, at most {limits.max_structured_choices}")
    if not all(choices):
        raise ValueError("a choice is empty")


def _check_tag(tag: dict[str, Any], limits: GatewaySettings) -> None:
    """Its schemas are compiled as any other."""
    _check_shape(tag, limits)
    nodes: list[object] = [tag]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes.extend(node)
        elif isinstance(node, dict):
            for key, value in node.items():
                is_schema = key in ("json_schema", "schema") and isinstance(value, dict)
                check_references(value) if is_schema else nodes.append(value)
