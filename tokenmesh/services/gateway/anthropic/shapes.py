"""Response bodies as msgspec structs. Names are Anthropic's."""

from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.openai.shapes import Usage

_STOP_REASONS: Final = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class OutputTokensDetails(msgspec.Struct):
    """What output tokens were for."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, omit_defaults=True):
    """Tokens of a message. Those of the prompt are the sum of the three counts of input."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    output_tokens_details: OutputTokensDetails | None = None


class MessageBody(msgspec.Struct, kw_only=True):
    """A whole answer, and with nothing in it the beginning of a streamed one."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer of count_tokens."""

    input_tokens: int


def message_usage(usage: Usage) -> MessageUsage:
    """The counts as Anthropic divides them: `input_tokens` are the tokens of the prompt that were
    neither read from the prefix cache nor written to it."""
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    cached = 0 if prompt is None else prompt.cached_tokens
    created = 0 if prompt is None else prompt.created_cache_tokens or 0
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached - created,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        cache_creation_input_tokens=created,
        output_tokens_details=(
            None if output is None else OutputTokensDetails(output.reasoning_tokens)
        ),
    )


def stop_of(finish_reason: str | None, stop_reason: str | int | None) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence` of a choice that has ended."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return _STOP_REASONS.get(finish_reason or "", "end_turn"), None
