"""A session's conversation as a chat request."""

from collections.abc import Iterable
from typing import Any, Final

from pydantic import ValidationError

from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.errors import invalid_fields
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.services.gateway.realtime.items import Item
from tokenmesh.services.gateway.realtime.session_config import SessionConfig
from tokenmesh.shared.errors import InvalidInput

Json = dict[str, Any]

_NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


class RealtimePrompt:
    """The request, and how to tell what is wrong with it."""

    def __init__(self, config: SessionConfig, items: Iterable[Item]) -> None:
        """Raises InvalidInput."""
        self.places = Places(_NAMES)
        self.places.add_tools(len(config.tools or ()))
        self._messages: list[Json] = []
        self._tools_by_call: dict[str, str] = {}
        if config.instructions:
            self._add({"role": "system", "content": config.instructions}, "instructions")
        for item in items:
            self._add_item(item)
        if not self._messages:
            raise InvalidInput(
                "response.input: there is nothing to answer; create an item first or send input",
                param="response.input",
            )
        fields = {"model": config.model, "messages": self._messages, **_generation(config)}
        try:
            self.body = ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise self.places.rename(invalid_fields(error)) from None

    def _add(self, message: Json, place: str) -> None:
        self._messages.append(message)
        self.places.add(place, [])

    def _add_item(self, item: Item) -> None:
        view, place = item.view, f"item {item.id}"
        if view["type"] == "message":
            self._add({"role": view["role"], "content": _content(view)}, place)
        elif view["type"] == "function_call":
            self._tools_by_call[view["call_id"]] = view["name"]
            self._calls(place).append(_call(view))
        else:
            call_id = view["call_id"]
            tool: Json = {"role": "tool", "tool_call_id": call_id, "content": view["output"]}
            if call_id in self._tools_by_call:
                tool["name"] = self._tools_by_call[call_id]
            self._add(tool, place)

    def _calls(self, place: str) -> list[Json]:
        """Text and calls of one turn are one message."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, place)
        calls: list[Json] = self._messages[-1].setdefault("tool_calls", [])
        return calls


def _content(view: Json) -> str | list[Json]:
    parts: list[Json] = []
    for part in view["content"]:
        if part["type"] == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            parts.append({"type": "text", "text": part["text"]})
    # A single text as a string: every template takes that.
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _call(view: Json) -> Json:
    function = {"name": view["name"], "arguments": view["arguments"]}
    return {"id": view["call_id"], "type": "function", "function": function}


def _generation(config: SessionConfig) -> Json:
    fields: Json = {"stream": True}
    if isinstance(config.max_output_tokens, int):
        fields["max_completion_tokens"] = config.max_output_tokens
    if config.temperature is not None:
        fields["temperature"] = config.temperature
    if config.reasoning and config.reasoning.get("effort") is not None:
        fields["reasoning_effort"] = config.reasoning["effort"]
    if config.tools:
        fields["tools"] = [_function(tool) for tool in config.tools]
        if config.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = config.parallel_tool_calls
    # Without tools only these two are without a meaning; others are refused.
    if config.tools or config.tool_choice not in ("auto", "none"):
        fields["tool_choice"] = _choice(config.tool_choice)
    return fields


def _function(tool: Json) -> Json:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _choice(choice: str | Json) -> str | Json:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice["name"]}}
