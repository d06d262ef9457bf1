"""The Response object, and the schemas of all bodies of the Responses API.

Bodies are plain data, since they are stored as JSON. The structs describe them for the OpenAPI
document.
"""

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.shared.errors import TokenMeshError

_ECHOED: Final = (
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
)
_DEFAULTS: Final[Json] = {
    "background": False,
    "metadata": {},
    "parallel_tool_calls": True,
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
_NULL: Final = (
    "ec_transfer_params",
    "error",
    "incomplete_details",
    "input_messages",
    "kv_transfer_params",
    "metrics",
    "output_messages",
    "prompt",
    "usage",
)
_RATE_LIMITED: Final = 429
_SERVER_ERROR: Final = 500


def response_object(
    body: ResponsesRequest,
    generation: GenerationRequest,
    response_id: str,
    created_s: float | None = None,
) -> Json:
    """The first state of a response. `created_s` (Unix time) None: now."""
    sampling = generation.jobs[0].sampling
    echoed = {name: getattr(body, name) for name in _ECHOED}
    nulls = {name: _DEFAULTS[name] for name in _DEFAULTS if echoed[name] is None}
    return {
        "id": response_id,
        "object": "response",
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "created_at": generation.head.created if created_s is None else int(created_s),
        "status": "queued" if body.background else "in_progress",
        "model": generation.head.model,
        "output": [],
        **echoed,
        **nulls,
        "reasoning": _reasoning(body),
        "text": _text(body),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **dict.fromkeys(_NULL),
    }


def _reasoning(body: ResponsesRequest) -> Json:
    given = body.reasoning
    if given is None:
        return {"effort": None, "summary": None}
    return {"effort": given.effort, "summary": given.summary or given.generate_summary}


def _text(body: ResponsesRequest) -> Json:
    given = body.text
    if given is None:
        return {"format": {"type": "text"}, "verbosity": None}
    shape: Json = {"type": "text"}
    if given.format is not None:
        shape = given.format.model_dump(by_alias=True, exclude_none=True)
    return {"format": shape, "verbosity": given.verbosity}


def usage_fields(turns: Iterable[Usage]) -> Json:
    """The usage of a response, as the sum over its turns."""
    counts = list(turns)
    prompts = [each.prompt_tokens_details for each in counts if each.prompt_tokens_details]
    reasoning = [each.completion_tokens_details for each in counts]
    media = {
        "image_tokens": sum(each.image_tokens for each in prompts),
        "audio_tokens": sum(each.audio_tokens for each in prompts),
        "video_tokens": sum(each.video_tokens for each in prompts),
    }
    return {
        "input_tokens": sum(each.prompt_tokens for each in counts),
        "input_tokens_details": {
            "cached_tokens": sum(each.cached_tokens for each in prompts),
            # All blocks are cached while there is room, not on request.
            "cache_write_tokens": 0,
            **{name: count for name, count in media.items() if count},
        },
        "output_tokens": sum(each.completion_tokens for each in counts),
        "output_tokens_details": {
            "reasoning_tokens": sum(each.reasoning_tokens for each in reasoning if each)
        },
        "total_tokens": sum(each.total_tokens for each in counts),
    }


def error_facts(error: TokenMeshError) -> dict[str, str]:
    """The `error` of a failed response; the code is one of OpenAI's."""
    code = "invalid_prompt"
    if error.status == _RATE_LIMITED:
        code = "rate_limit_exceeded"
    elif error.status >= _SERVER_ERROR:
        code = "server_error"
    return {"code": code, "message": error.message}


Progress = Literal["in_progress", "completed", "incomplete"]


class InputTokens(msgspec.Struct, kw_only=True):
    """The response of input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class _Item(msgspec.Struct, kw_only=True, tag_field="type"):
    id: str


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text part of a message."""

    text: str
    annotations: list[Json]
    logprobs: list[Json] | None


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text part of reasoning."""

    text: str


class OutputMessage(_Item, kw_only=True, tag="message"):
    """An answer of the model."""

    role: Literal["assistant"]
    content: list[OutputText]
    status: Progress


class ReasoningItem(_Item, kw_only=True, tag="reasoning"):
    """Reasoning of the model."""

    summary: list[Json]
    content: list[ReasoningText]
    encrypted_content: None
    status: Progress


class FunctionCall(_Item, kw_only=True, tag="function_call"):
    """A call that the client executes; `arguments` is JSON text."""

    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str
    status: Progress


class CustomToolCall(_Item, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool, which takes free text."""

    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    input: str
    status: Progress


class McpListTools(_Item, kw_only=True, tag="mcp_list_tools"):
    """The tools of an MCP server."""

    server_label: str
    tools: list[Json]
    error: str | None


class McpCall(_Item, kw_only=True, tag="mcp_call"):
    """A call that the gateway executes."""

    server_label: str
    name: str
    arguments: str
    approval_request_id: str | None
    output: str | None
    error: Json | None
    status: Literal["in_progress", "calling", "completed", "incomplete", "failed"]


OutputItem = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall | McpListTools | McpCall


class Response(msgspec.Struct, kw_only=True):
    """A response in its current state. It also has fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
    error: Json | None = None
    incomplete_details: Json | None = None
    usage: Json | None = None


class ResponseDeleted(msgspec.Struct, kw_only=True):
    """Confirms that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(msgspec.Struct, kw_only=True):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool
