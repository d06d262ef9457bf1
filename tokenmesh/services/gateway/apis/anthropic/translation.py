"""A request of the Messages API as a chat request."""

from typing import Any, Final

from pydantic import Field

from tokenmesh.services.gateway.apis.anthropic.conversation import MessagesConversation
from tokenmesh.services.gateway.apis.anthropic.errors import ThreadNotFound
from tokenmesh.services.gateway.apis.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    ToolChoice,
)
from tokenmesh.services.gateway.apis.openai.request import switch_thinking
from tokenmesh.services.gateway.apis.openai.translation import (
    FieldNames,
    Json,
    TranslatedChat,
    function_sources,
    read_object,
    schema_format,
    validate_chat,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.fields import Bounded
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
"""Fields with the same name and meaning in a chat request."""
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
"""Fields of a chat request that have another name here."""
_FEW_BLOCKS: Final = 128
_NOT_SERVED: Final = ("container", "mcp_servers")


class MessagesTool(Bounded, extra="allow", strict=True):
    """A tool that the client executes."""

    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def is_long(body: CountTokensRequest) -> bool:
    """Return whether `translate` takes more than a few milliseconds."""
    contents = [each.content for each in body.messages]
    lists = (contents, body.tools or (), body.system or (), *contents)
    return any(len(each) > _FEW_BLOCKS for each in lists if not isinstance(each, str))


def translate(body: CountTokensRequest) -> TranslatedChat:
    """Raises InvalidInput that names the client's fields."""
    if isinstance(body, MessagesRequest):
        _check_served(body)
    conversation = MessagesConversation()
    conversation.add_system(body.system)
    for index, message in enumerate(body.messages):
        conversation.add_turn(message, f"messages[{index}].content")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    sources = conversation.sources | function_sources(len(functions), "input_schema")
    fields: Json = {
        "model": body.model,
        "messages": conversation.messages,
        **_ending(conversation.messages, f"messages[{len(body.messages) - 1}]"),
        **_tool_choice(body.tool_choice, functions),
        **_thinking(body),
        **_output(body),
    }
    if functions:
        fields["tools"] = functions
    if isinstance(body, MessagesRequest):
        fields |= _generation(body)
    names = FieldNames(_NAMES, sources)
    chat = validate_chat(fields, names)
    chat.merges_system = True
    return TranslatedChat(chat=chat, fields=names)


def _check_served(body: MessagesRequest) -> None:
    for name in _NOT_SERVED:
        if getattr(body, name):
            raise invalid(name, "is not supported", NotSupported)
    if body.thread is not None and body.thread.type == "continue":
        # With this error clients resend the whole history.
        raise ThreadNotFound("thread is not stored here: send all messages", param="thread")


def _function(value: Json, path: str) -> Json:
    """A tool as a chat's function. Anthropic's built-in tools are refused."""
    kind = value.get("type")
    if kind not in (None, "custom"):
        problem = (
            f"{str(kind)[:64]!r} is a built-in tool of Anthropic and not supported; define a "
            "tool with name, description and input_schema"
        )
        raise invalid(f"{path}.type", problem, NotSupported)
    tool = read_object(MessagesTool, value, path)
    if tool.input_schema.get("type") != "object":
        raise invalid(f"{path}.input_schema.type", "must be 'object'")
    function: Json = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None, functions: list[Json]) -> Json:
    if choice is None:
        return {}
    if choice.type in ("any", "tool") and not functions:
        raise invalid("tool_choice.type", f"{choice.type!r} needs tools")
    fields: Json = {"tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.type == "tool":
        names = [each["function"]["name"] for each in functions]
        if choice.name not in names:
            known = ", ".join(names[:16])
            raise invalid("tool_choice.name", f"{choice.name!r} does not match any tool ({known})")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _ending(messages: list[Json], path: str) -> Json:
    """A last turn of the assistant is the beginning of the answer."""
    if not messages:
        raise invalid(path, "is empty: there is nothing to answer")
    if messages[-1]["role"] != "assistant":
        return {}
    if "tool_calls" in messages[-1]:
        raise invalid(path, "ends with tool_use: send each result in a tool_result block")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _thinking(body: CountTokensRequest) -> Json:
    """The client's `chat_template_kwargs` win over `thinking`."""
    own = body.chat_template_kwargs or {}
    thinking = body.thinking
    if thinking is None:
        return {"chat_template_kwargs": own} if own else {}
    switches = switch_thinking(thinking.type != "disabled")
    fields: Json = {"chat_template_kwargs": switches | own}
    if thinking.type != "enabled":
        return fields
    budget, path = thinking.budget_tokens, "thinking.budget_tokens"
    if budget is None:
        raise invalid(path, "is missing: type 'enabled' needs it")
    if isinstance(body, MessagesRequest) and budget >= body.max_tokens:
        raise invalid(path, f"is {budget}: it must be less than max_tokens ({body.max_tokens})")
    return fields | {"thinking_token_budget": budget}


def _output(body: CountTokensRequest) -> Json:
    fields: Json = {}
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
        fields["response_format"] = schema_format(given.schema_)
    return fields


def _generation(body: MessagesRequest) -> Json:
    fields: Json = {name: getattr(body, name) for name in _SAME if name in body.model_fields_set}
    if body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if body.metadata is not None and body.metadata.user_id is not None:
        fields["user"] = body.metadata.user_id
    if body.service_tier is not None:
        fields["service_tier"] = "auto" if body.service_tier == "auto" else "default"
    return fields
