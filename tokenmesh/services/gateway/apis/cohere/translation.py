"""A request of Cohere's Chat API as a chat request."""

import json
from collections.abc import Iterator
from typing import Any, Final

from tokenmesh.services.gateway.apis.cohere.request import (
    CohereChatRequest,
    CohereMessage,
    CohereThinking,
)
from tokenmesh.services.gateway.apis.openai.request import switch_thinking
from tokenmesh.services.gateway.apis.openai.translation import (
    ChatMessages,
    FieldNames,
    Json,
    TranslatedChat,
    chat_call,
    chat_content,
    get_string,
    schema_format,
    validate_chat,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid

_SAME: Final = (
    *("max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty", "stream"),
    *("logprobs", "priority", "kv_transfer_params", "watermarking"),
)
"""Fields with the same name and meaning in a chat request."""
_NAMES: Final = {
    "stop": "stop_sequences",
    "structured_outputs": "response_format",
    "thinking_token_budget": "thinking.token_budget",
    "top_k": "k",
    "top_p": "p",
}
"""Fields of a chat request that have another name here."""
_FEW_BLOCKS: Final = 128
_BLOCKS: Final = {
    "user": ("text", "image_url"),
    "assistant": ("text", "thinking"),
    "system": ("text",),
    "tool": ("text", "document"),
}
"""Types of content blocks by the role of their turn."""


def is_long(body: CohereChatRequest) -> bool:
    """Return whether `translate` takes more than a few milliseconds."""
    contents = [each.content for each in body.messages if isinstance(each.content, list)]
    lists: list[list[Any]] = [body.tools or [], body.documents or [], body.messages, *contents]
    return any(len(each) > _FEW_BLOCKS for each in lists)


def translate(body: CohereChatRequest) -> TranslatedChat:
    """Raises InvalidInput that names the client's fields."""
    messages = ChatMessages()
    for index, message in enumerate(body.messages):
        _add(messages, message, f"messages[{index}]")
    fields: Json = {
        "model": body.model,
        "messages": messages.messages,
        **{name: getattr(body, name) for name in _SAME if getattr(body, name) is not None},
        **_tools(body),
        **_format(body),
        **_template(body),
    }
    optional = {"stop": body.stop_sequences, "top_k": body.k, "top_p": body.p}
    fields |= {name: value for name, value in optional.items() if value is not None}
    # Items of log-probabilities have token ids too.
    fields["return_token_ids"] = bool(body.logprobs)
    names = FieldNames(_NAMES, messages.sources)
    return TranslatedChat(chat=validate_chat(fields, names), fields=names)


def _add(messages: ChatMessages, message: CohereMessage, path: str) -> None:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise invalid(f"{path}.content", "is missing")
    own: Json = {"role": role}
    parts, thoughts = _parts(message, role, f"{path}.content")
    if parts or role != "assistant":
        own["content"] = chat_content(parts) if parts else ""
    if role == "assistant":
        thoughts += [message.tool_plan] if message.tool_plan else []
        if thoughts:
            own["reasoning"] = "".join(thoughts)
        if message.tool_calls:
            own["tool_calls"] = [
                chat_call(each.id, each.function.name, each.function.arguments)
                for each in message.tool_calls
            ]
    elif role == "tool":
        if not message.tool_call_id:
            raise invalid(f"{path}.tool_call_id", "is missing")
        own["tool_call_id"] = message.tool_call_id
    messages.add(own, path, [f"{path}.content[{i}]" for i in range(len(parts))])


def _parts(message: CohereMessage, role: str, path: str) -> tuple[list[Json], list[str]]:
    """The content as a chat's parts, and the assistant's thoughts."""
    if not isinstance(message.content, list):
        text = message.content
        return ([{"type": "text", "text": text}] if text else []), []
    parts: list[Json] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        kind = block.get("type")
        if kind not in _BLOCKS[role]:
            allowed = ", ".join(_BLOCKS[role])
            problem = f"is {str(kind)[:64]!r}; allowed types: {allowed}"
            raise invalid(f"{where}.type", problem, NotSupported)
        if kind == "thinking":
            thoughts.append(get_string(block, "thinking", where, is_empty_ok=True))
        elif kind == "text":
            text = get_string(block, "text", where, is_empty_ok=True)
            parts.append({"type": "text", "text": text})
        elif kind == "document":
            text = json.dumps(_member(block, "document", where), ensure_ascii=False)
            parts.append({"type": "text", "text": text})
        else:
            parts.append({"type": "image_url", "image_url": _member(block, "image_url", where)})
    if role == "assistant" and parts:
        parts = [{"type": "text", "text": "".join(each["text"] for each in parts)}]
    return parts, thoughts


def _member(block: Json, name: str, path: str) -> Json:
    value = block.get(name)
    if not isinstance(value, dict):
        raise invalid(f"{path}.{name}", "must be an object")
    return value


def _tools(body: CohereChatRequest) -> Json:
    if body.tool_choice == "REQUIRED" and not body.tools:
        raise invalid("tool_choice", "'REQUIRED' needs tools")
    if not body.tools:
        return {}
    strict = {"strict": True} if body.strict_tools else {}
    functions = [
        {**each.function.model_dump(include=_FUNCTION, exclude_none=True), **strict}
        for each in body.tools
    ]
    choice = {"REQUIRED": "required", "NONE": "none"}.get(body.tool_choice or "", "auto")
    tools = [{"type": "function", "function": each} for each in functions]
    return {"tools": tools, "tool_choice": choice}


_FUNCTION: Final = {"name", "description", "parameters"}


def _format(body: CohereChatRequest) -> Json:
    given = body.response_format
    if given is None or given.type == "text":
        return {}
    if given.json_schema is None:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": schema_format(given.json_schema)}


def _template(body: CohereChatRequest) -> Json:
    """Return what the chat template gets; the client's `chat_template_kwargs` win."""
    kwargs: Json = {}
    fields: Json = {}
    if body.safety_mode is not None:
        kwargs["safety_mode"] = body.safety_mode.lower()
    if body.citation_options is not None:
        kwargs["citation_options"] = body.citation_options
    if body.thinking is not None:
        kwargs |= switch_thinking(body.thinking.type == "enabled")
        fields |= _budget(body.thinking)
    if body.documents:
        fields["documents"] = list(_documents(body.documents))
    kwargs |= body.chat_template_kwargs or {}
    return fields | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _budget(thinking: CohereThinking) -> Json:
    if thinking.token_budget is None or thinking.type == "disabled":
        return {}
    return {"thinking_token_budget": thinking.token_budget}


def _documents(documents: list[str | dict[str, Any]]) -> Iterator[Json]:
    """Documents in the form that chat templates read."""
    for index, document in enumerate(documents):
        if isinstance(document, str):
            yield {"text": document}
            continue
        data = document.get("data", {})
        if not isinstance(data, str | dict):
            raise invalid(f"documents[{index}].data", "must be a string or an object")
        own = {"text": data} if isinstance(data, str) else data
        name = document.get("id")
        yield own if name is None else {"id": name, **own}
