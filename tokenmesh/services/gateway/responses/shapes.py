"""The Response object and what it is made of. Plain data: it is stored and sent as it is."""

from collections.abc import Iterable
from typing import Any, Final

from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.openai.shapes import Usage
from tokenmesh.services.gateway.responses.request import ResponsesRequest
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
_WHERE_NULL: Final[dict[str, Any]] = {
    "background": False,
    "metadata": {},
    "parallel_tool_calls": True,
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
_EMPTY: Final = (
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
_SERVERS_FAULT: Final = 500


def response_object(
    body: ResponsesRequest, ask: GenerationRequest, response_id: str, created_s: float | None = None
) -> dict[str, Any]:
    """A Response that nothing has happened to yet."""
    sampling = ask.jobs[0].sampling
    echoed = {name: getattr(body, name) for name in _ECHOED}
    nulls = {name: _WHERE_NULL[name] for name in _WHERE_NULL if echoed[name] is None}
    return {
        "id": response_id,
        "object": "response",
        "created_at": ask.head.created if created_s is None else int(created_s),
        "status": "queued" if body.background else "in_progress",
        "model": ask.head.model,
        "output": [],
        **echoed,
        **nulls,
        "reasoning": _reasoning(body),
        "text": _text(body),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **dict.fromkeys(_EMPTY),
    }


def _reasoning(body: ResponsesRequest) -> dict[str, Any]:
    asked = body.reasoning
    if asked is None:
        return {"effort": None, "summary": None}
    return {"effort": asked.effort, "summary": asked.summary or asked.generate_summary}


def _text(body: ResponsesRequest) -> dict[str, Any]:
    asked = body.text
    shape = asked.format if asked is not None else None
    told = {"type": "text"} if shape is None else shape.model_dump(by_alias=True, exclude_none=True)
    return {"format": told, "verbosity": asked.verbosity if asked is not None else None}


def usage_fields(turns: Iterable[Usage]) -> dict[str, Any]:
    """The counts of all turns of a response."""
    counts = list(turns)
    cached = [each.prompt_tokens_details for each in counts]
    reasoning = [each.completion_tokens_details for each in counts]
    return {
        "input_tokens": sum(each.prompt_tokens for each in counts),
        "input_tokens_details": {
            "cached_tokens": sum(each.cached_tokens for each in cached if each),
            # Nobody writes by intent: all blocks are kept while there is room.
            "cache_write_tokens": 0,
        },
        "output_tokens": sum(each.completion_tokens for each in counts),
        "output_tokens_details": {
            "reasoning_tokens": sum(each.reasoning_tokens for each in reasoning if each)
        },
        "total_tokens": sum(each.total_tokens for each in counts),
    }


def error_facts(error: TokenMeshError) -> dict[str, str]:
    """The code is one of OpenAI's."""
    code = "invalid_prompt"
    if error.status == _RATE_LIMITED:
        code = "rate_limit_exceeded"
    elif error.status >= _SERVERS_FAULT:
        code = "server_error"
    return {"code": code, "message": error.message}
