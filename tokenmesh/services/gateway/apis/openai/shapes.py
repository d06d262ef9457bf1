"""Response bodies as msgspec structs. Names are OpenAI's and vLLM's."""

from typing import Any

import msgspec

from tokenmesh.services.gateway.core.generation.usage import Usage

Json = Any
"""A value that is already plain JSON data."""


class TopLogprob(msgspec.Struct):
    """A candidate at one position of a chat choice."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """The chosen token at one position of a chat choice."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of one choice of a chat."""

    content: list[ChatLogprob]
    refusal: None = None


class FunctionOut(msgspec.Struct):
    """The function of a tool call."""

    name: str
    arguments: str = ""
    """JSON text as the model wrote it."""


class ToolCallOut(msgspec.Struct):
    """A tool call of a chat's answer."""

    id: str
    function: FunctionOut
    type: str = "function"


class ChatMessageOut(msgspec.Struct):
    """The message of a chat's answer."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCallOut] | msgspec.UnsetType = msgspec.UNSET
    """Left out without calls."""
    reasoning: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The body of a chat response."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[str, Json] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of one choice of a completion; each list has one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Json] | None] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The body of a completion response."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None


class ModelPermission(msgspec.Struct, kw_only=True):
    """It holds what clients may do with a model; old OpenAI clients read it."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelDrafts(msgspec.Struct):
    """Where drafts of a model's next tokens come from, by vLLM's names."""

    method: str
    num_speculative_tokens: int


class ModelParallelism(msgspec.Struct):
    """The division of a model over processes of a worker, by vLLM's names."""

    tensor_parallel_size: int
    pipeline_parallel_size: int


class Model(msgspec.Struct, kw_only=True):
    """One entry of /v1/models."""

    id: str
    object: str = "model"
    created: int
    root: str
    max_model_len: int
    owned_by: str = "tokenmesh"
    parent: str | None = None
    permission: list[ModelPermission]
    tasks: list[str]
    """`generate`, and tasks of pooling."""
    speculative_config: ModelDrafts | None = None
    """None: there are no drafts."""
    kv_tiers: list[str] = []
    """Where KV is that the pools of its workers have lost: host, disk, mooncake."""
    parallel_config: ModelParallelism | None = None
    """None: one process computes it."""


class ModelList(msgspec.Struct, kw_only=True):
    """The body of /v1/models."""

    object: str = "list"
    data: list[Model]


class TokenizeResult(msgspec.Struct):
    """The body of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResult(msgspec.Struct):
    """The body of /detokenize."""

    prompt: str
