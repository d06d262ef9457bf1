"""Bodies of the derender routes with vLLM's field names: responses of generate."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from tokenmesh.services.gateway.apis.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.core.http.fields import Bounded, NotNegative, Off, TokenId


class _Part(BaseModel, extra="ignore", strict=True, allow_inf_nan=False):
    """Unknown fields are ignored: another version of generate may answer with more."""


class LogprobCandidate(_Part):
    """A token at one position."""

    token_id: TokenId
    logprob: float
    rank: int | None = None


class SampledLogprob(LogprobCandidate):
    """The sampled token at one position."""

    top_logprobs: list[LogprobCandidate] = []


class ChoiceLogprobs(_Part):
    """Log-probabilities of one choice."""

    content: list[SampledLogprob] | None = None


class TokensChoice(_Part):
    """A choice of generate, whole or what one chunk adds to it."""

    index: NotNegative
    token_ids: list[TokenId] | None = None
    finish_reason: Literal["stop", "length", "repetition", "abort"] | None = None
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None


class PromptCell(_Part):
    """One candidate for a prompt's token."""

    logprob: float
    rank: int | None = None


class CachedTokens(_Part):
    """Where prompt tokens came from."""

    cached_tokens: NotNegative | None = None
    created_cache_tokens: NotNegative | None = None


class TokensUsage(_Part):
    """The usage that generate reported."""

    prompt_tokens: NotNegative = 0
    completion_tokens: NotNegative | None = 0
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def created_cache_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.created_cache_tokens


class TokensChunk(_Part):
    """One chunk of generate's stream."""

    choices: list[TokensChoice]
    request_id: str | None = Field(default=None, max_length=1024)
    usage: TokensUsage | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: list[dict[str, PromptCell] | None] | None = None
    output_mode: Literal["tokens"] = "tokens"


class TokensResponse(TokensChunk):
    """A whole response of generate."""

    created: NotNegative | None = None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class StreamState(BaseModel, extra="forbid", strict=True):
    """It holds what the client sends back between the chunks of one choice.

    It contains only what the client has received: a forged state misleads only its client. It is
    bounded by the model's length.
    """

    created: NotNegative
    role_sent: bool = False
    """It tells whether the first chunk of the choice was written."""
    output_token_ids: list[TokenId] = []


class DerenderRequest(Bounded, extra="ignore", strict=True, allow_inf_nan=False):
    """Fields of both routes. With `stream` a request is one chunk of one choice."""

    model: str | None = None
    stream: Off = False
    generate_chunk: TokensChunk | None = None
    """With `stream`."""
    stream_state: StreamState | None = None
    """From the response to the choice's previous chunk."""


class DerenderChatRequest(DerenderRequest):
    """The body of /v1/chat/completions/derender."""

    generate_response: TokensResponse | None = None
    """Without `stream`."""
    prompt_tokens: NotNegative | None = None
    prompt_token_ids: list[TokenId] | None = None
    chat_request: ChatRequest | None = None


class DerenderCompletionRequest(DerenderRequest):
    """The body of /v1/completions/derender. Without `stream` lists have an entry a prompt."""

    generate_responses: list[TokensResponse] | None = None
    """Without `stream`."""
    prompt_tokens: NotNegative | list[NotNegative] | None = None
    prompt_token_ids: list[TokenId] | list[list[TokenId] | None] | None = None
    prompt_index: NotNegative = 0
    """With `stream`: which prompt of `completion_request` the chunk belongs to."""
    completion_request: CompletionRequest | None = None
