"""Tools of a request as the chat declares them, and which of them a name in an answer means."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.responses.custom_tools import PARAMETERS
from tokenmesh.services.gateway.responses.reading import (
    get_objects,
    get_optional_string,
    get_string,
    one_of,
)
from tokenmesh.shared.errors import InvalidInput

_CHOICES: Final = ("none", "auto", "required")
_OPTIONAL: Final = ("description", "parameters", "strict")
_SERVED: Final = "function, custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """A tool of an MCP server, which the gateway itself calls."""

    server_label: str
    name: str
    function_name: str
    """What the model calls it."""
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a function that the model may call is to the client."""

    kind: Literal["function", "custom", "mcp"] = "function"
    server_label: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """All that the model is offered."""

    declared: list[dict[str, Any]]
    names: dict[str, ToolName]
    places: dict[str, str]
    """By a function's name: the path of the tool it came from."""


def read_tools(
    tools: Sequence[dict[str, Any]], served: Mapping[str, Sequence[ServerTool]]
) -> ToolSet:
    """`served`: by the path of an MCP server in `tools`, what it offers. Raises InvalidInput."""
    found = ToolSet([], {}, {})
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        kind = get_string(tool, "type", place)
        if kind == "function":
            _add(found, _function(tool, place), ToolName(), place)
        elif kind == "custom":
            _add(found, _custom(tool, place), ToolName("custom"), place)
        elif place in served:
            for each in served[place]:
                name = ToolName("mcp", each.server_label, each.name)
                _add(found, _of_server(each), name, place)
        else:
            raise NotSupported(
                f"{place}.type {kind[:60]!r} is not served here; served are {_SERVED}",
                param=f"{place}.type",
            )
    return found


def _add(found: ToolSet, function: Mapping[str, Any], name: ToolName, place: str) -> None:
    if function["name"] in found.names:
        where = f"{place}.name"
        raise InvalidInput(f"{where} {function['name']!r} is there twice", param=where)
    found.places[function["name"]] = place
    found.names[function["name"]] = name
    found.declared.append({"type": "function", "function": dict(function)})


def _function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    name = get_string(tool, "name", place)
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        where = f"{place}.parameters"
        raise InvalidInput(f"{where} must be an object (a JSON schema)", param=where)
    get_optional_string(tool, "description", place)
    if not isinstance(tool.get("strict"), bool | None):
        raise InvalidInput(f"{place}.strict must be a boolean", param=f"{place}.strict")
    given = {key: tool[key] for key in _OPTIONAL if tool.get(key) is not None}
    return {"name": name, **given}


def _custom(tool: dict[str, Any], place: str) -> dict[str, Any]:
    name = get_string(tool, "name", place)
    description = get_optional_string(tool, "description", place)
    shape = tool.get("format")
    if shape is not None and (not isinstance(shape, dict) or shape.get("type") != "text"):
        where = f"{place}.format"
        raise NotSupported(f"{where}: only {{'type': 'text'}} is supported", param=where)
    told = {} if description is None else {"description": description}
    return {"name": name, "parameters": PARAMETERS, **told}


def _of_server(tool: ServerTool) -> dict[str, Any]:
    told = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.function_name, "parameters": tool.parameters, **told}


def choose(choice: str | dict[str, Any] | None, tools: ToolSet) -> tuple[Any, list[dict[str, Any]]]:
    """The chat's `tool_choice`, and the tools that are left to choose from. Raises InvalidInput."""
    if choice is None or isinstance(choice, str):
        chosen = one_of(choice or "auto", _CHOICES, "tool_choice")
        if chosen == "required" and not tools.declared:
            raise InvalidInput("tool_choice 'required' needs tools", param="tool_choice")
        return (chosen if tools.declared else None), tools.declared
    kinds = ("function", "custom", "mcp", "allowed_tools")
    kind = one_of(choice.get("type"), kinds, "tool_choice.type")
    if kind == "allowed_tools":
        return _allow(choice, tools)
    names = _names_of(choice, tools, "tool_choice")
    if len(names) > 1:
        return "required", _only(tools, names)
    return {"type": "function", "function": {"name": names.pop()}}, tools.declared


def _allow(choice: dict[str, Any], tools: ToolSet) -> tuple[Any, list[dict[str, Any]]]:
    mode = one_of(choice.get("mode"), ("auto", "required"), "tool_choice.mode")
    names: set[str] = set()
    for index, each in enumerate(get_objects(choice, "tools", "tool_choice")):
        names |= _names_of(each, tools, f"tool_choice.tools[{index}]")
    if not names:
        raise InvalidInput("tool_choice.tools is empty", param="tool_choice.tools")
    return mode, _only(tools, names)


def _names_of(choice: dict[str, Any], tools: ToolSet, place: str) -> set[str]:
    """The functions that a choice of one tool, or of a server's tools, means."""
    kind = one_of(choice.get("type"), ("function", "custom", "mcp"), f"{place}.type")
    name = get_optional_string(choice, "name", place)
    if kind != "mcp":
        wanted = get_string(choice, "name", place)
        found = {key for key, each in tools.names.items() if key == wanted and each.kind == kind}
    else:
        label = get_string(choice, "server_label", place)
        found = {
            key
            for key, each in tools.names.items()
            if each.server_label == label and name in (None, each.name)
        }
    if not found:
        told = name if name is not None else choice.get("server_label")
        raise InvalidInput(f"{place} names {str(told)[:80]!r}, which is not in tools", param=place)
    return found


def _only(tools: ToolSet, names: set[str]) -> list[dict[str, Any]]:
    return [each for each in tools.declared if each["function"]["name"] in names]
