"""Tools of a request as functions of a chat, and what a function name in the output refers to.

A custom tool takes free text: to the model it is a function with one string, `input`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from tokenmesh.services.gateway.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.openai.translation import (
    Json,
    get_objects,
    get_optional_string,
    get_string,
    one_of,
)
from tokenmesh.services.gateway.responses.mcp_servers import RequestedServer

Listings = Mapping[str, Sequence[Json]]
"""Tools of MCP servers in OpenAI's shape, by the path of the server in the request."""

_CHOICES: Final = ("none", "auto", "required")
_OPTIONAL: Final = ("description", "parameters", "strict")
_CUSTOM_PARAMETERS: Final[Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_HOSTED: Final = re.compile(
    "(web_search|file_search|code_interpreter|image_generation|computer|computer_use_preview"
    "|local_shell|shell|apply_patch|tool_search|namespace)(_preview)?(_[0-9_]+)?"
)
"""Tools of OpenAI's servers, and of clients that fall back on others: they are left out."""
_MAX_DEFINITION: Final = 16_384
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """A tool of an MCP server, which the gateway calls."""

    server_label: str
    name: str
    function_name: str
    """The name that the model sees."""
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's tool behind a function of the chat."""

    kind: Literal["function", "custom", "mcp"] = "function"
    server_label: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """All functions of the chat. `names` and `paths` are keyed by function name."""

    declared: list[Json]
    names: dict[str, ToolName]
    paths: dict[str, str]
    """The client's path of the tool."""
    warnings: list[str] = field(default_factory=list)


def server_tools(
    servers: Sequence[RequestedServer], listings: Listings, tools: Sequence[Json]
) -> dict[str, list[ServerTool]]:
    """Tools of MCP servers by the servers' paths; a name in use is prefixed with the label."""
    taken = {each.get("name") for each in tools if each.get("type") != "mcp"}
    found: dict[str, list[ServerTool]] = {}
    for server in servers:
        found[server.place] = []
        for tool in listings[server.place]:
            name = _UNSAFE.sub("_", tool["name"])[:_MAX_NAME_CHARS]
            number = 1
            while name in taken:
                number += 1
                name = f"{server.label}_{tool['name']}_{number}"
                name = _UNSAFE.sub("_", name)[-_MAX_NAME_CHARS:]
            taken.add(name)
            found[server.place].append(
                ServerTool(
                    server_label=server.label,
                    name=tool["name"],
                    function_name=name,
                    description=tool["description"],
                    parameters=tool["input_schema"],
                )
            )
    return found


def read_tools(tools: Sequence[Json], served: Mapping[str, Sequence[ServerTool]]) -> ToolSet:
    """`served`: as from `server_tools`. Raises InvalidInput."""
    found = ToolSet([], {}, {})
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        kind = get_string(tool, "type", path)
        if kind == "function":
            _add(found, _function(tool, path), ToolName(), path)
        elif kind == "custom":
            function, warning = _custom(tool, path)
            found.warnings.extend(warning)
            _add(found, function, ToolName("custom"), path)
        elif path in served:
            for each in served[path]:
                function = _declared(each.function_name, each.description, each.parameters)
                _add(found, function, ToolName("mcp", each.server_label, each.name), path)
        elif _HOSTED.fullmatch(kind):
            found.warnings.append(f"{path} left out: {kind} is not served")
        else:
            problem = f"{kind[:60]!r} is not supported; supported types: function, custom"
            raise invalid(f"{path}.type", problem, NotSupported)
    return found


def _add(found: ToolSet, function: Json, tool: ToolName, path: str) -> None:
    name = function["name"]
    if name in found.names:
        raise invalid(f"{path}.name", f"{name!r} appears twice")
    found.paths[name] = path
    found.names[name] = tool
    found.declared.append({"type": "function", "function": function})


def _function(tool: Json, path: str) -> Json:
    name = get_string(tool, "name", path)
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{path}.parameters", "must be an object (a JSON schema)")
    get_optional_string(tool, "description", path)
    if not isinstance(tool.get("strict"), bool | None):
        raise invalid(f"{path}.strict", "must be a boolean")
    return {"name": name} | {key: tool[key] for key in _OPTIONAL if tool.get(key) is not None}


def _custom(tool: Json, path: str) -> tuple[Json, list[str]]:
    """The function, and warnings: a grammar is shown to the model, which may not follow it."""
    name = get_string(tool, "name", path)
    description = get_optional_string(tool, "description", path)
    shape = tool.get("format")
    if shape is None:
        return _declared(name, description, _CUSTOM_PARAMETERS), []
    if not isinstance(shape, dict):
        raise invalid(f"{path}.format", "must be an object")
    if one_of(shape.get("type"), ("text", "grammar"), f"{path}.format.type") == "text":
        return _declared(name, description, _CUSTOM_PARAMETERS), []
    syntax = one_of(shape.get("syntax"), ("lark", "regex"), f"{path}.format.syntax")
    definition = get_string(shape, "definition", f"{path}.format")
    if len(definition) > _MAX_DEFINITION:
        raise invalid(f"{path}.format.definition", f"has more than {_MAX_DEFINITION} characters")
    shown = f"The input follows this {syntax} grammar:\n{definition}"
    description = f"{description}\n\n{shown}" if description else shown
    warning = f"{path}.format is shown to the model, its input is not bound to it"
    return _declared(name, description, _CUSTOM_PARAMETERS), [warning]


def _declared(name: str, description: str | None, parameters: Mapping[str, Any]) -> Json:
    given = {} if description is None else {"description": description}
    return {"name": name, "parameters": parameters, **given}


def to_arguments(text: str) -> str:
    """The arguments of a custom tool's call with this input."""
    return msgspec.json.encode({"input": text}).decode()


def to_input(arguments: str) -> str:
    """The input of a custom tool's call; all of the arguments if they have another form."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def choose(choice: str | Json | None, tools: ToolSet) -> tuple[Any, list[Json]]:
    """The chat's `tool_choice`, and the functions that may be called. Raises InvalidInput."""
    if choice is None or isinstance(choice, str):
        chosen = one_of(choice or "auto", _CHOICES, "tool_choice")
        if chosen == "required" and not tools.declared:
            raise invalid("tool_choice", "'required' needs tools")
        return (chosen if tools.declared else None), tools.declared
    kinds = ("function", "custom", "mcp", "allowed_tools")
    if one_of(choice.get("type"), kinds, "tool_choice.type") == "allowed_tools":
        return _allow(choice, tools)
    names = _names_of(choice, tools, "tool_choice")
    if len(names) > 1:
        return "required", _only(tools, names)
    return {"type": "function", "function": {"name": names.pop()}}, tools.declared


def _allow(choice: Json, tools: ToolSet) -> tuple[Any, list[Json]]:
    mode = one_of(choice.get("mode"), ("auto", "required"), "tool_choice.mode")
    names: set[str] = set()
    for index, each in enumerate(get_objects(choice, "tools", "tool_choice")):
        names |= _names_of(each, tools, f"tool_choice.tools[{index}]")
    if not names:
        raise invalid("tool_choice.tools", "is empty")
    return mode, _only(tools, names)


def _names_of(choice: Json, tools: ToolSet, path: str) -> set[str]:
    """The functions of a tool, or of an MCP server's tools."""
    kind = one_of(choice.get("type"), ("function", "custom", "mcp"), f"{path}.type")
    name = get_optional_string(choice, "name", path)
    if kind != "mcp":
        wanted = get_string(choice, "name", path)
        found = {key for key, each in tools.names.items() if key == wanted and each.kind == kind}
    else:
        label = get_string(choice, "server_label", path)
        found = {
            key
            for key, each in tools.names.items()
            if each.server_label == label and name in (None, each.name)
        }
    if not found:
        given = name if name is not None else choice.get("server_label")
        raise invalid(path, f"names {str(given)[:80]!r}, which does not match any tool")
    return found


def _only(tools: ToolSet, names: set[str]) -> list[Json]:
    return [each for each in tools.declared if each["function"]["name"] in names]
