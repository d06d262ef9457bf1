"""A request of the Responses API as a chat request.

Every rule of generation is the chat's; errors about the chat name fields of the client's request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.services.gateway.apis.openai.former_fields import refuse_former_fields
from tokenmesh.services.gateway.apis.openai.request import ChatRequest
from tokenmesh.services.gateway.apis.openai.translation import (
    FieldNames,
    Json,
    TranslatedChat,
    validate_chat,
    warn_unknown,
)
from tokenmesh.services.gateway.apis.responses.items import ItemsConversation
from tokenmesh.services.gateway.apis.responses.request import LOGPROBS, ResponsesRequest, TextFormat
from tokenmesh.services.gateway.apis.responses.tools import (
    ServerTool,
    ToolName,
    ToolSet,
    choose,
    read_tools,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.errors import FieldPath

_SERVER_CALL: Final = "mcp_call"
_FEW_ITEMS: Final = 128
_PREVIOUS: Final = "previous_response_id"
_DIFFERENT: Final = frozenset(
    ("tools", "tool_choice", "top_logprobs", "metadata", "stream_options", "store", "reasoning")
)
_SAME: Final = (
    frozenset(ResponsesRequest.model_fields) & frozenset(ChatRequest.model_fields) - _DIFFERENT
)
"""Fields with the same name and meaning in a chat request."""
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
"""Fields of a chat request that have another name here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesTranslation(TranslatedChat):
    """Also the tools behind the chat's functions."""

    names: dict[str, ToolName] = field(default_factory=dict)
    """By function name."""
    warnings: list[str] = field(default_factory=list)


def translate(
    body: ResponsesRequest,
    previous: Sequence[Json] = (),
    served: Mapping[str, Sequence[ServerTool]] | None = None,
) -> ResponsesTranslation:
    """`previous`: input and output of earlier responses, and earlier output of this one.

    References to items must have been resolved; `served` is as for `read_tools`.
    Raises InvalidInput that names the client's fields.
    """
    refuse_former_fields(body.model_extra, ResponsesRequest.model_fields)
    _check_served(body)
    tools = read_tools(body.tools or (), served or {})
    conversation = _converse(body, previous, tools)
    choice, declared = choose(body.tool_choice, tools)
    if choice != "none" and body.items[-1:] and body.items[-1].get("type") == _SERVER_CALL:
        # The required call has been made, so the next turn is free.
        choice = "auto"
    fields: Json = {name: getattr(body, name) for name in _SAME & body.model_fields_set}
    fields |= _own_fields(body)
    fields["messages"] = conversation.messages
    if declared:
        fields |= {"tools": declared, "tool_choice": choice}
    names = FieldNames(_NAMES, conversation.sources | _tool_sources(declared, tools))
    return ResponsesTranslation(
        chat=validate_chat(fields, names),
        fields=names,
        names=tools.names,
        warnings=[*tools.warnings, *_warnings(body)],
    )


def is_long(body: ResponsesRequest, previous: Sequence[Json] = ()) -> bool:
    """Return whether `translate` takes more than a few milliseconds."""
    tools = body.tools or ()
    nested = [each for tool in tools if isinstance(each := tool.get("tools"), list)]
    return sum(map(len, (body.items, previous, tools, *nested))) > _FEW_ITEMS or any(
        isinstance(content := item.get("content"), list) and len(content) > _FEW_ITEMS
        for item in body.items
    )


def _converse(
    body: ResponsesRequest, previous: Sequence[Json], tools: ToolSet
) -> ItemsConversation:
    conversation = ItemsConversation({each: name for name, each in tools.names.items()})
    if body.instructions:
        conversation.add_instructions(body.instructions, "instructions")
    for item in previous:
        conversation.add_item(item, _PREVIOUS)
    for index, item in enumerate(body.items):
        conversation.add_item(item, f"input[{index}]" if isinstance(body.input, list) else "input")
    conversation.finish()
    if not conversation.messages:
        raise invalid("input", "is empty")
    return conversation


def _tool_sources(declared: Sequence[Json], tools: ToolSet) -> dict[FieldPath, str]:
    sources: dict[FieldPath, str] = {}
    for index, tool in enumerate(declared):
        path = tools.paths[tool["function"]["name"]]
        sources["tools", index] = sources["tools", index, "function"] = path
    return sources


def _own_fields(body: ResponsesRequest) -> Json:
    """Fields that have another name or form in a chat request."""
    fields: Json = {}
    if body.service_tier not in (None, "auto", "default"):
        fields["service_tier"] = "default"
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


def _response_format(shape: TextFormat) -> Json:
    if shape.type == "json_object":
        return {"type": "json_object"}
    for name, value in (("name", shape.name), ("schema", shape.json_schema)):
        if value is None:
            raise invalid(f"text.format.{name}", "is missing: a json_schema needs it")
    given = shape.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": given}


def _check_served(body: ResponsesRequest) -> None:
    """Raises NotSupported for fields and values that are not served."""
    options = body.stream_options
    given = {
        "prompt": body.prompt is not None,
        "previous_input_messages": bool(body.previous_input_messages),
        "stream_options.include_obfuscation": bool(options and options.include_obfuscation),
    }
    for name, is_given in given.items():
        if is_given:
            raise invalid(name, "is not supported", NotSupported)
    if options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")


def _warnings(body: ResponsesRequest) -> list[str]:
    """Fields that have no effect."""
    warnings: list[str] = []
    warn_unknown(body.unknown_fields, warnings)
    if body.top_logprobs and not body.shows_logprobs:
        warnings.append(f"top_logprobs has no effect without include {LOGPROBS}")
    if body.text is not None and body.text.verbosity in ("low", "high"):
        warnings.append("text.verbosity has no effect")
    if body.service_tier not in (None, "auto", "default"):
        warnings.append(f"service_tier {body.service_tier} has no effect: there is one tier")
    reasoning = body.reasoning
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        warnings.append("reasoning.summary has no effect: reasoning is sent in full")
    warnings.extend(
        f"include {name} has no effect"
        for name in dict.fromkeys(body.include or ())
        if name != LOGPROBS
    )
    return warnings
