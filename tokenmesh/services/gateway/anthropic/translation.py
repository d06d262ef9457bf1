"""From Anthropic's body to a chat request: every rule of generation is written once, for chats."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from tokenmesh.services.gateway.anthropic.conversation import MessagesConversation
from tokenmesh.services.gateway.anthropic.errors import ThreadNotFound
from tokenmesh.services.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from tokenmesh.services.gateway.anthropic.tools import translate_choice, translate_tools
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.errors import NotSupported, invalid_fields
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.shared.errors import InvalidInput

_SAME: Final = (
    "max_tokens",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "cache_salt",
    "mm_payload",
    "return_mm_kwargs",
    "watermarking",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
)
"""Fields with one name and one meaning in both."""

_NAMES: Final = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "structured_outputs": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "user": "metadata.user_id",
}
"""Fields of a chat request that go by another name here."""

_FEW_BLOCKS: Final = 128
_NOT_SERVED: Final = ("container", "mcp_servers")

_SWITCHES: Final = ("enable_thinking", "thinking")
"""How templates call the variable that lets a model think."""


@dataclass(frozen=True, slots=True)
class MessagesTranslation:
    """The chat request, and how to tell what is wrong with it."""

    body: ChatRequest
    places: Places


def is_long(body: CountTokensRequest) -> bool:
    """Whether `translate` takes more than a few milliseconds."""
    contents = [each.content for each in body.messages]
    lists = (contents, body.tools or (), body.system or (), *contents)
    return any(len(each) > _FEW_BLOCKS for each in lists if not isinstance(each, str))


def translate(body: CountTokensRequest) -> MessagesTranslation:
    """Raises InvalidInput that names the client's fields."""
    if isinstance(body, MessagesRequest):
        _check_served(body)
    places = Places(_NAMES)
    conversation = MessagesConversation(places)
    conversation.add_system(body.system)
    for index, message in enumerate(body.messages):
        conversation.add(message, f"messages[{index}]")
    functions = translate_tools(body.tools)
    places.add_tools(len(functions or ()), "input_schema")
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": conversation.messages,
        **_ending(conversation.messages, f"messages[{len(body.messages) - 1}]"),
        **translate_choice(body.tool_choice, functions),
        **_thinking(body),
        **_output(body),
    }
    if functions:
        fields["tools"] = functions
    if isinstance(body, MessagesRequest):
        fields |= _generation(body)
    return MessagesTranslation(_make(fields, places), places)


def _make(fields: dict[str, Any], places: Places) -> ChatRequest:
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise places.rename(invalid_fields(error)) from None


def _ending(messages: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """A last turn of the assistant is the beginning of the answer."""
    if not messages:
        raise InvalidInput(f"{place}: there is nothing to answer", param=place)
    if messages[-1]["role"] != "assistant":
        return {}
    if "tool_calls" in messages[-1]:
        raise InvalidInput(
            f"{place} ends with tool_use: send the results in a tool_result each", param=place
        )
    return {"add_generation_prompt": False, "continue_final_message": True}


def _thinking(body: CountTokensRequest) -> dict[str, Any]:
    """What the client says itself about its template goes first."""
    own = body.chat_template_kwargs or {}
    thinking = body.thinking
    if thinking is None:
        return {"chat_template_kwargs": own} if own else {}
    switches = dict.fromkeys(_SWITCHES, thinking.type != "disabled")
    fields: dict[str, Any] = {"chat_template_kwargs": switches | own}
    if thinking.type != "enabled":
        return fields
    if thinking.budget_tokens is None:
        where = "thinking.budget_tokens"
        raise InvalidInput(f"{where} is missing: type 'enabled' needs it", param=where)
    if isinstance(body, MessagesRequest) and thinking.budget_tokens >= body.max_tokens:
        raise InvalidInput(
            f"thinking.budget_tokens is {thinking.budget_tokens}: it must be less than max_tokens "
            f"({body.max_tokens})",
            param="thinking.budget_tokens",
        )
    return fields | {"thinking_token_budget": thinking.budget_tokens}


def _output(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    config = body.output_config
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    given = config.format if config is not None else None
    if given is not None and body.output_format is not None:
        raise InvalidInput(
            "output_format and output_config.format are the same: send one", param="output_format"
        )
    given = given or body.output_format
    if given is not None:
        schema = {"name": "output", "schema": given.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _check_served(body: MessagesRequest) -> None:
    for name in _NOT_SERVED:
        if getattr(body, name):
            raise NotSupported(f"{name} is not supported", param=name)
    if body.thread is not None and body.thread.type == "continue":
        # What clients of a server that has lost a thread can recover from by themselves.
        raise ThreadNotFound("thread: none is kept, send all messages", param="thread")


def _generation(body: MessagesRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: getattr(body, name) for name in _SAME if name in body.model_fields_set
    }
    if body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        fields["user"] = body.metadata.user_id
    if body.service_tier is not None:
        fields["service_tier"] = "auto" if body.service_tier == "auto" else "default"
    return fields
