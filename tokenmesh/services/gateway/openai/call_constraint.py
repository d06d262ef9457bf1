"""The constraint that makes an answer tool calls; `parsers/tools/forced.py` reads such answers."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.shared.messages.structured import Structured


def named_call(tool: ToolSchema) -> Structured:
    """The answer is the arguments of this function."""
    return _json(tool.parameters)


def required_calls(tools: Sequence[ToolSchema], *, max_calls: int) -> Structured:
    """The answer is a list of 1 to `max_calls` objects {"name": ..., "parameters": ...}.

    Definitions that a function's schema refers to move with it to the root of the whole.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for index, tool in enumerate(tools):
        parameters: Any = tool.parameters
        key = f"call{index}"
        moved = _move_references(parameters, f"#/$defs/{key}")
        if moved != parameters:
            definitions[key] = moved
            parameters = {"$ref": f"#/$defs/{key}"}
        calls.append(_call(tool.name, parameters))
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if definitions:
        schema["$defs"] = definitions
    return _json(schema)


def _json(schema: dict[str, Any]) -> Structured:
    text = msgspec.json.encode(schema).decode()
    # With free whitespace a weak model may write nothing else once it has no more to say.
    return Structured(kind="json", text=text, any_whitespace=False, field="tools")


def _call(name: str, parameters: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _move_references(value: Any, root: str) -> Any:
    """The schema with its references to its own root now pointing to where that root is."""
    if isinstance(value, list):
        return [_move_references(each, root) for each in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _move_references(each, root) for key, each in value.items()}
    target = value.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:]
    return moved
