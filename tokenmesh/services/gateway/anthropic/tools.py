"""Tools and the choice among them, as a chat request has them."""

from typing import Any

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.anthropic.blocks import read_part
from tokenmesh.services.gateway.anthropic.request import ToolChoice
from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.shared.errors import InvalidInput


class MessagesTool(Bounded):
    """A client's own tool: the model asks, the client does."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def translate_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as functions. Raises InvalidInput, NotSupported for Anthropic's own ones."""
    if tools is None:
        return None
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _function(value: dict[str, Any], place: str) -> dict[str, Any]:
    kind = value.get("type")
    if kind not in (None, "custom"):
        raise NotSupported(
            f"{place}.type: {str(kind)[:64]!r} is a tool of Anthropic's and not served here; "
            "describe your own one with name, description and input_schema",
            param=f"{place}.type",
        )
    tool = read_part(MessagesTool, value, place)
    if tool.input_schema.get("type") != "object":
        where = f"{place}.input_schema.type"
        raise InvalidInput(f"{where} must be 'object'", param=where)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def translate_choice(
    choice: ToolChoice | None, functions: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The fields of a chat request that say the same. Raises InvalidInput."""
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type in ("any", "tool") and not functions:
        raise InvalidInput(
            f"tool_choice.type {choice.type!r} needs tools", param="tool_choice.type"
        )
    fields["tool_choice"] = _choice(choice, functions or [])
    return fields


def _choice(choice: ToolChoice, functions: list[dict[str, Any]]) -> str | dict[str, Any]:
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    names = [each["function"]["name"] for each in functions]
    if choice.name not in names:
        raise InvalidInput(
            f"tool_choice.name: {choice.name!r} is none of the tools ({', '.join(names[:16])})",
            param="tool_choice.name",
        )
    return {"type": "function", "function": {"name": choice.name}}
