"""A request of the Responses API as the chat that it asks for.

Every rule of generation is the chat's. Errors about the chat are told in the client's words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.errors import NotSupported, invalid_fields
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.services.gateway.responses.items import Item, ItemsConversation
from tokenmesh.services.gateway.responses.request import LOGPROBS, ResponsesRequest, TextFormat
from tokenmesh.services.gateway.responses.tools import (
    ServerTool,
    ToolName,
    ToolSet,
    choose,
    read_tools,
)
from tokenmesh.shared.errors import InvalidInput

_SERVER_CALL: Final = "mcp_call"
_FEW_ITEMS: Final = 128
_PREVIOUS: Final = "previous_response_id"
_OTHERWISE: Final = frozenset(
    ("tools", "tool_choice", "top_logprobs", "metadata", "stream_options", "store", "reasoning")
)
_SAME: Final = (
    frozenset(ResponsesRequest.model_fields) & frozenset(ChatRequest.model_fields) - _OTHERWISE
)
"""Fields that mean the same in a chat."""
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "logprobs": "top_logprobs",
    "truncate_prompt_tokens": "truncation",
}
"""What is called otherwise there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesTranslation:
    """A chat, and the way back."""

    chat: ChatRequest
    places: Places
    names: dict[str, ToolName] = field(default_factory=dict)
    """By what the model calls them: the tools that it may call."""
    warnings: list[str] = field(default_factory=list)


def translate(
    body: ResponsesRequest,
    previous: Sequence[Item] = (),
    served: Mapping[str, Sequence[ServerTool]] | None = None,
) -> ResponsesTranslation:
    """`previous`: input and output of the responses before this one, and of this one so far.

    References to items must have been replaced; `served` is as `read_tools` wants it.
    Raises InvalidInput that names the client's own field.
    """
    _refuse(body)
    tools = read_tools(body.tools or (), served or {})
    conversation = _converse(body, previous, tools)
    choice, declared = choose(body.tool_choice, tools)
    if choice != "none" and body.items[-1:] and body.items[-1].get("type") == _SERVER_CALL:
        # The call that had to be made has been made: the model goes on as it likes.
        choice = "auto"
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME & body.model_fields_set}
    fields |= _own_fields(body)
    fields["messages"] = conversation.messages
    if declared:
        fields |= {"tools": declared, "tool_choice": choice}
    places = Places(_NAMES, conversation.sources | _tool_paths(declared, tools))
    try:
        chat = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise places.rename(invalid_fields(error)) from None
    return ResponsesTranslation(
        chat=chat, places=places, names=tools.names, warnings=_warnings(body)
    )


def is_long(body: ResponsesRequest, previous: Sequence[Item] = ()) -> bool:
    """Whether `translate` takes more than a few milliseconds."""
    parts = (body.items, previous, body.tools or ())
    return sum(map(len, parts)) > _FEW_ITEMS or any(
        isinstance(content := item.get("content"), list) and len(content) > _FEW_ITEMS
        for item in body.items
    )


def _converse(
    body: ResponsesRequest, previous: Sequence[Item], tools: ToolSet
) -> ItemsConversation:
    conversation = ItemsConversation(
        {(each.server_label, each.name): name for name, each in tools.names.items()}
    )
    if body.instructions:
        conversation.instruct(body.instructions)
    for item in previous:
        conversation.add(item, _PREVIOUS)
    for index, item in enumerate(body.items):
        conversation.add(item, f"input[{index}]" if isinstance(body.input, list) else "input")
    conversation.finish()
    if not conversation.messages:
        raise InvalidInput("input is empty", param="input")
    return conversation


def _tool_paths(declared: Sequence[dict[str, Any]], tools: ToolSet) -> dict[str, str]:
    paths = {}
    for index, tool in enumerate(declared):
        place = tools.places[tool["function"]["name"]]
        paths[f"tools[{index}]"] = paths[f"tools[{index}].function"] = place
    return paths


def _own_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Fields that a chat has under another name."""
    fields: dict[str, Any] = {}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.shows_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    shape = body.text.format if body.text is not None else None
    if shape is not None and shape.type != "text":
        fields["response_format"] = _response_format(shape)
    return fields


def _response_format(shape: TextFormat) -> dict[str, Any]:
    if shape.type == "json_object":
        return {"type": "json_object"}
    for name, value in (("name", shape.name), ("schema", shape.json_schema)):
        if value is None:
            where = f"text.format.{name}"
            raise InvalidInput(f"{where} is missing: a json_schema needs it", param=where)
    given = shape.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": given}


def _refuse(body: ResponsesRequest) -> None:
    """Fields that ask for what is not served."""
    options, text = body.stream_options, body.text
    asked = {
        "conversation": body.conversation is not None,
        "prompt": body.prompt is not None,
        "previous_input_messages": bool(body.previous_input_messages),
        "stream_options.include_obfuscation": bool(options and options.include_obfuscation),
        "text.verbosity": text is not None and text.verbosity in ("low", "high"),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise NotSupported(f"{name} is not supported", param=name)
    if options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream to be true", param="stream_options")


def _warnings(body: ResponsesRequest) -> list[str]:
    """What was asked for and has no effect."""
    warnings = []
    if body.unknown_fields:
        names = ", ".join(name[:64] for name in body.unknown_fields[:16])
        warnings.append(f"unknown fields ignored: {names}")
    if body.top_logprobs and not body.shows_logprobs:
        warnings.append(f"top_logprobs has no effect without include {LOGPROBS}")
    reasoning = body.reasoning
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        warnings.append("reasoning.summary has no effect: reasoning is told in full")
    warnings.extend(
        f"include {name} has no effect"
        for name in dict.fromkeys(body.include or ())
        if name != LOGPROBS
    )
    return warnings
