"""ToolUse: which functions a chat may call and whether it must, from OpenAI's fields."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from tokenmesh.services.gateway.openai.request import ChatRequest, Tool
from tokenmesh.services.gateway.parsers.parser import ToolSchema
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import FieldPath, InvalidInput, field_name

Mode = Literal["none", "auto", "required", "named"]

_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,128}", re.ASCII)
_ROOTS: Final = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf"})
"""A schema with one of these describes its root."""

_MAX_SHOWN: Final = 128
"""Characters of a wrong value in an error."""

_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: Mode = "none"
    shown: tuple[Tool, ...] = ()
    """What the chat template gets."""
    schemas: tuple[ToolSchema, ...] = ()
    """Functions that may be called; with mode `named` the one that must be."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")

    @property
    def has_strict(self) -> bool:
        """Whether a call that the model may make has to follow its schema."""
        return self.mode == "auto" and any(schema.strict for schema in self.schemas)


def read_tools(body: ChatRequest, limits: GatewaySettings) -> ToolUse:
    """The tools and tool_choice of a chat. Raises InvalidInput."""
    tools = body.tools or []
    schemas = _read_schemas(tools, limits)
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        # The model must not see the tools at all.
        return ToolUse()
    if not tools and choice != "auto":
        raise InvalidInput("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, str):
        return _use(_read_mode(choice, "tool_choice"), tools, schemas)
    return _read_choice(choice, tools, schemas)


def _use(mode: Mode, tools: Sequence[Tool], schemas: Sequence[ToolSchema]) -> ToolUse:
    return ToolUse(mode=mode if tools else "none", shown=tuple(tools), schemas=tuple(schemas))


def _read_mode(value: object, place: str) -> Mode:
    if value == "auto" or value == "required":
        return value
    raise InvalidInput(
        f"{place} is {_shown(value)}; it must be none, auto, required, or an object that names a "
        "function",
        param="tool_choice",
    )


def _read_choice(
    choice: dict[str, Any], tools: Sequence[Tool], schemas: Sequence[ToolSchema]
) -> ToolUse:
    kind = choice.get("type")
    if kind == "function":
        named = _find(_name_in(choice, "tool_choice"), schemas, "tool_choice.function.name")
        return ToolUse(mode="named", shown=tuple(tools), schemas=(schemas[named],))
    if kind == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), tools, schemas)
    raise InvalidInput(
        f"tool_choice.type is {_shown(kind)}; it must be function or allowed_tools",
        param="tool_choice",
    )


def _read_allowed(allowed: object, tools: Sequence[Tool], schemas: Sequence[ToolSchema]) -> ToolUse:
    place = "tool_choice.allowed_tools"
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(allowed, dict) or not isinstance(entries, list) or not entries:
        raise InvalidInput(f"{place}.tools must list at least one function", param="tool_choice")
    places = []
    for index, entry in enumerate(entries):
        where = f"{place}.tools[{index}]"
        places.append(_find(_name_in(entry, where), schemas, f"{where}.function.name"))
    mode = _read_mode(allowed.get("mode", "auto"), f"{place}.mode")
    kept = sorted(set(places))
    return _use(mode, [tools[each] for each in kept], [schemas[each] for each in kept])


def _name_in(entry: object, place: str) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidInput(f"{place}.function.name must be a string", param="tool_choice")
    return name


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN]


def _find(name: str, schemas: Sequence[ToolSchema], place: str) -> int:
    for index, schema in enumerate(schemas):
        if schema.name == name:
            return index
    raise InvalidInput(f"{place}: {_shown(name)} is not among tools", param="tool_choice")


def _read_schemas(tools: Sequence[Tool], limits: GatewaySettings) -> list[ToolSchema]:
    if len(tools) > limits.max_tools:
        raise InvalidInput(
            f"tools holds {len(tools)} functions, at most {limits.max_tools}", param="tools"
        )
    num_bytes = len(msgspec.json.encode(tools)) if tools else 0
    if num_bytes > limits.max_tools_bytes:
        raise InvalidInput(
            f"tools is {num_bytes} bytes of JSON, at most {limits.max_tools_bytes}", param="tools"
        )
    schemas = [
        _read_function(tool["function"], ("tools", index, "function"))
        for index, tool in enumerate(tools)
    ]
    names = set[str]()
    for index, schema in enumerate(schemas):
        if schema.name in names:
            path = ("tools", index, "function", "name")
            raise _invalid(path, f"{schema.name!r} is there twice")
        names.add(schema.name)
    return schemas


def _read_function(function: dict[str, Any], path: FieldPath) -> ToolSchema:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(
            (*path, "name"), "must be 1 to 128 letters, digits, underscores, dots or dashes"
        )
    if not isinstance(function.get("description"), str | None):
        raise _invalid((*path, "description"), "must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise _invalid((*path, "parameters"), "must be a JSON schema of type object")
    if not _ROOTS & parameters.keys():
        parameters = {"type": "object", **parameters}
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _invalid((*path, "strict"), "must be a boolean")
    return ToolSchema(name=name, parameters=parameters, strict=strict is True)


def _invalid(path: FieldPath, problem: str) -> InvalidInput:
    return InvalidInput(f"{field_name(path)} {problem}", param="tools", path=path)
