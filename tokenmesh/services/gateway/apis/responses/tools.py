"""Tools of a request as functions of a chat, and what a function name in the output refers to.

A custom tool takes free text: to the model it is a function with one string, `input`. A tool of a
namespace is a function too, whose name begins with the namespace's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Literal

import msgspec

from tokenmesh.services.gateway.apis.openai.translation import (
    Json,
    get_objects,
    get_optional_string,
    get_string,
    one_of,
)
from tokenmesh.services.gateway.apis.responses.mcp_servers import RequestedServer
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.json_schema import LARK

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
    "|local_shell|shell|apply_patch|tool_search)(_preview)?(_[0-9_]+)?"
)
"""Tools of OpenAI's servers, and of clients that fall back on others: they are left out."""
_MAX_DEFINITION: Final = 16_384
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARS: Final = 64
_MAX_OWN_NAME_CHARS: Final = 256
"""It bounds the name of a namespace, and of a tool in one: both are joined for each tool, and for
each call."""
_DIGEST_CHARS: Final = 8


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
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """The function's name where no other one has it."""
        if self.namespace is None:
            return self.name
        flat = f"{self.namespace.rstrip('_')}__{self.name.lstrip('_')}"
        return _UNSAFE.sub("_", flat[-_MAX_NAME_CHARS:])

    @property
    def long_name(self) -> str:
        """The function's name where another one has the flat name: the same in every request."""
        whole = sha256(f"{self.namespace}\0{self.name}".encode(errors="replace")).hexdigest()
        digest = whole[:_DIGEST_CHARS]
        return f"{self.flat_name[: _MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


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
    taken = {name for tool in tools if isinstance(name := tool.get("name"), str)}
    taken |= {each.function_name for listed in served.values() for each in listed}
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        kind = get_string(tool, "type", path)
        if kind in ("function", "custom"):
            _add_own(found, tool, path)
        elif kind == "namespace":
            _add_namespace(found, tool, taken, path)
        elif path in served:
            for each in served[path]:
                function = _declared(each.function_name, each.description, each.parameters)
                _add(found, function, ToolName("mcp", each.server_label, each.name), path)
        elif _HOSTED.fullmatch(kind):
            found.warnings.append(f"{path} left out: {kind} is not served")
        else:
            problem = (
                f"{kind[:60]!r} is not supported; supported types: function, custom, namespace"
            )
            raise invalid(f"{path}.type", problem, NotSupported)
    return found


def _add_own(found: ToolSet, tool: Json, path: str) -> None:
    """A function or a custom tool."""
    if tool["type"] == "function":
        function = _function(tool, path)
        _add(found, function, ToolName(name=function["name"]), path)
        return
    function = _custom(tool, path)
    _add(found, function, ToolName("custom", name=function["name"]), path)


def _own_name(tool: Json, path: str) -> str:
    name = get_string(tool, "name", path)
    if len(name) > _MAX_OWN_NAME_CHARS:
        raise invalid(f"{path}.name", f"has more than {_MAX_OWN_NAME_CHARS} characters")
    return name


def _add_namespace(found: ToolSet, tool: Json, taken: set[str], path: str) -> None:
    """Each tool of a namespace; the first one shows the description of the whole."""
    namespace = _own_name(tool, path)
    about = get_optional_string(tool, "description", path)
    for index, each in enumerate(get_objects(tool, "tools", path)):
        place = f"{path}.tools[{index}]"
        one_of(each.get("type"), ("function", "custom"), f"{place}.type")
        kind: Literal["function", "custom"] = "custom" if each["type"] == "custom" else "function"
        name = ToolName(kind, name=_own_name(each, place), namespace=namespace)
        flat = name.flat_name if name.flat_name not in taken else name.long_name
        first = found.names.get(name.flat_name)
        is_repeated = first and (first.namespace, first.name) == (namespace, name.name)
        if is_repeated or flat in taken:
            raise invalid(
                f"{place}.name", f"{name.name[:80]!r} appears twice in {namespace[:80]!r}"
            )
        taken.add(flat)
        function = _function(each, place) if kind == "function" else _custom(each, place)
        if about and index == 0:
            own = function.get("description")
            shown = f"About {namespace}: {about}"
            function["description"] = f"{own}\n\n{shown}" if own else shown
        _add(found, {**function, "name": flat}, name, place)


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


def _custom(tool: Json, path: str) -> Json:
    """The function, strict where a grammar binds its input."""
    name = get_string(tool, "name", path)
    description = get_optional_string(tool, "description", path)
    shape = tool.get("format")
    if shape is None:
        return _declared(name, description, _CUSTOM_PARAMETERS)
    if not isinstance(shape, dict):
        raise invalid(f"{path}.format", "must be an object")
    if one_of(shape.get("type"), ("text", "grammar"), f"{path}.format.type") == "text":
        return _declared(name, description, _CUSTOM_PARAMETERS)
    syntax = one_of(shape.get("syntax"), ("lark", "regex"), f"{path}.format.syntax")
    definition = get_string(shape, "definition", f"{path}.format")
    if len(definition) > _MAX_DEFINITION:
        raise invalid(f"{path}.format.definition", f"has more than {_MAX_DEFINITION} characters")
    shown = f"The input follows this {syntax} grammar:\n{definition}"
    description = f"{description}\n\n{shown}" if description else shown
    bound = {LARK: definition} if syntax == "lark" else {"pattern": f"^(?:{definition})$"}
    parameters = {**_CUSTOM_PARAMETERS, "properties": {"input": {"type": "string", **bound}}}
    return {**_declared(name, description, parameters), "strict": True}


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
        wanted = ToolName(
            "custom" if kind == "custom" else "function",
            name=get_string(choice, "name", path),
            namespace=get_optional_string(choice, "namespace", path),
        )
        found = {key for key, each in tools.names.items() if each == wanted}
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
