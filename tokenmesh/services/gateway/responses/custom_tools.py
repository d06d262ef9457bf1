"""Custom tools take free text. To the model each is a function with one string, `input`."""

from typing import Any, Final

import msgspec

PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def to_arguments(text: str) -> str:
    """The arguments of a call with this input."""
    return msgspec.json.encode({"input": text}).decode()


def to_input(arguments: str) -> str:
    """The input of a call with these arguments; all of them where the model wrote it otherwise."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
