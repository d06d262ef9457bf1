"""Response bodies of the scale-out routes as msgspec structs. Names are vLLM's."""

from typing import Any

import msgspec

from tokenmesh.services.gateway.apis.openai.shapes import ChatCompletion, Completion
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.shared.messages.structured import CallForms

Json = Any
"""A value that is already plain JSON data."""


class TokenCandidate(msgspec.Struct):
    """A token at one position."""

    token_id: int
    logprob: float
    rank: int | None = None


class TokenLogprob(TokenCandidate):
    """The sampled token at one position."""

    top_logprobs: list[TokenCandidate] = []
    """The sampled token first, then the other candidates by rank, or as they were named."""


class GenerateLogprobs(msgspec.Struct):
    """Log-probabilities of one choice of generate."""

    content: list[TokenLogprob]


class GenerateChoice(msgspec.Struct, kw_only=True):
    """One choice, or what one chunk adds to it."""

    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    """With output_mode "text"."""
    logprobs: Json = None
    """GenerateLogprobs; with output_mode "text" the log-probabilities of a chat."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int]
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None


class GenerateChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    request_id: str
    output_mode: str
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, Json] | None] | msgspec.UnsetType = msgspec.UNSET
    """In the first chunk of each choice, if the client requested them."""


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The body of a whole response."""

    request_id: str
    model: str
    created: int
    output_mode: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Json] | None] | None = None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: dict[str, Json] | None = None
    ec_transfer_params: None = None


class RenderedSampling(msgspec.Struct, kw_only=True):
    """`sampling_params` with every default filled in; contains all `Sampled` fields."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: list[int] | None
    logit_bias: dict[str, float] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    stream_interval: int | None
    structured_outputs: dict[str, Json] | None
    thinking_token_budget: int | None
    repetition_detection: dict[str, Json] | None
    detokenize: bool = True


class RenderedFacts(msgspec.Struct, kw_only=True):
    """The field `rendered`: see `generate_request.RenderedPrompt`."""

    bad_words_token_ids: list[list[int]] | None = None
    reasoning_end_token_ids: list[list[int]] | None = None
    thinking: dict[str, Json] | None = None
    calls: CallForms | None = None


class RenderedRequest(msgspec.Struct, kw_only=True):
    """The response of a render route: the body for /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    sampling_params: RenderedSampling
    model: str
    stream: bool
    stream_options: dict[str, Json] | None
    cache_salt: str | None
    priority: int
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    token_offsets: list[tuple[int, int]] | None = None
    """Where each token begins and ends in the text, in characters."""
    features: None = None
    content_parts: None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Json] | None = None
    kv_transfer_params: dict[str, Json] | None = None
    ec_transfer_params: None = None
    rendered: RenderedFacts


class DerenderedChat(ChatCompletion, kw_only=True):
    """The response of /v1/chat/completions/derender."""

    kv_transfer_params: dict[str, Json] | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, Json] | msgspec.UnsetType = msgspec.UNSET
    """The metrics of the answer of generate."""


class DerenderedCompletion(Completion, kw_only=True):
    """The response of /v1/completions/derender."""

    kv_transfer_params: dict[str, Json] | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[str, Json] | msgspec.UnsetType = msgspec.UNSET
    """The metrics of the answer of generate."""


class DerenderState(msgspec.Struct, kw_only=True):
    """The client sends it back with the next chunk of the choice."""

    created: int
    role_sent: bool
    output_token_ids: list[int]


class DerenderedChunk(msgspec.Struct, kw_only=True):
    """The response to one chunk."""

    chunk: dict[str, Json]
    stream_state: DerenderState | None
