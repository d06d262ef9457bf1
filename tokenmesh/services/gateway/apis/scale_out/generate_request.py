"""Bodies of /inference/v1/generate and /inference/v1/abort_requests, with vLLM's field names."""

import copy
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, Field, field_validator

from tokenmesh.services.gateway.apis.openai.sampling_fields import (
    SamplingFields,
    StreamOptions,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.fields import (
    Bounded,
    MinusOneOrMore,
    NotNegative,
    On,
    Positive,
    Priority,
    TokenId,
)
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages.sampling import ThinkingBudget
from tokenmesh.shared.messages.structured import CallForms

_MAX_SEQUENCES: Final = 2048
_MAX_SEQUENCE_TOKENS: Final = 256
_Sequence = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_SEQUENCE_TOKENS)]
_OUTER: Final = (
    "model",
    "request_id",
    "stream",
    "stream_options",
    "return_token_ids",
    "cache_salt",
    "priority",
)
"""Fields of SamplingFields that are not in `sampling_params`."""
_NOT_SERVED: Final = ("features", "content_parts", "ec_transfer_params")
_SAMPLING_NOT_SERVED: Final = (
    "extra_args",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "skip_reading_prefix_cache",
    "trace_decode_token_ids",
)


class GenerateSampling(SamplingFields):
    """vLLM's SamplingParams. Absent fields are neutral; without `max_tokens` as many as fit."""

    max_tokens: Positive | None = None
    logprobs: MinusOneOrMore | None = None
    detokenize: On = True

    # Written by vLLM's renderer, without effect.
    flat_logprobs: Any = None
    output_kind: Any = None
    output_text_buffer_length: Any = None
    skip_clone: Any = None

    # Known and not served.
    extra_args: dict[str, Any] | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: list[Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    trace_decode_token_ids: list[Any] | None = None

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _without_private(cls, given: object) -> object:
        """vLLM's renderer also writes its private fields."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not str(name).startswith("_")}


class ThinkingRule(BaseModel, extra="forbid", strict=True):
    """A `ThinkingBudget` as JSON."""

    num_tokens: NotNegative
    is_open: bool = False
    num_spent: NotNegative = 0
    start_ids: list[TokenId] = Field(default=[], max_length=_MAX_SEQUENCE_TOKENS)
    end_ids: _Sequence
    other_ends: list[_Sequence] = Field(default=[], max_length=_MAX_SEQUENCES)

    @property
    def budget(self) -> ThinkingBudget:
        return ThinkingBudget(**self.model_dump())


class RenderedPrompt(BaseModel, extra="forbid", strict=True):
    """It holds what the renderer derived with the tokenizer, so that generate works without one."""

    bad_words_token_ids: list[_Sequence] | None = Field(default=None, max_length=_MAX_SEQUENCES)
    reasoning_end_token_ids: list[_Sequence] | None = Field(default=None, max_length=64)
    """structured_outputs applies after the first of these sequences; empty: at once."""
    thinking: ThinkingRule | None = None
    calls: dict[str, Any] | None = None
    """Calls that may be written in place of what structured_outputs says."""

    def call_forms(self) -> CallForms | None:
        """The calls. Raises InvalidInput."""
        try:
            return msgspec.convert(self.calls, CallForms | None)
        except msgspec.ValidationError as error:
            raise invalid("rendered.calls", f"is not what render has made: {error}") from None

    @property
    def highest_id(self) -> int:
        """The highest token id."""
        thinking = self.thinking
        sequences = [*(self.bad_words_token_ids or ()), *(self.reasoning_end_token_ids or ())]
        if thinking is not None:
            sequences += [thinking.start_ids, thinking.end_ids, *thinking.other_ends]
        return max((token_id for ids in sequences for token_id in ids), default=0)


class ReasoningParserKwargs(BaseModel, extra="forbid", strict=True):
    """Arguments of the prompt's template."""

    chat_template_kwargs: dict[str, Any] = {}


class GenerateRequest(Bounded, extra="allow", strict=True, allow_inf_nan=False):
    """The body of /inference/v1/generate, as the render routes return it."""

    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: GenerateSampling
    request_id: str | None = Field(default=None, min_length=1)
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Priority = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: ReasoningParserKwargs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    rendered: RenderedPrompt | None = None
    token_offsets: list[Any] | None = None

    # Known and not served.
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None
    ec_transfer_params: dict[str, Any] | None = None

    @property
    def fields(self) -> GenerateSampling:
        """`sampling_params` with the fields that a chat has besides them."""
        outer = {name: getattr(self, name) for name in _OUTER if name in self.model_fields_set}
        # Here prompt_logprobs goes with a stream: derender needs it for an echo.
        only_here = {"prompt_logprobs": None, "truncate_prompt_tokens": None, "echo": False}
        return self.sampling_params.model_copy(update=only_here | outer)

    def refuse_not_served(self) -> None:
        """Raise NotSupported for the first field that is not served."""
        for name in _NOT_SERVED:
            if getattr(self, name):
                raise invalid(name, "is not supported", NotSupported)
        for name in _SAMPLING_NOT_SERVED:
            if getattr(self.sampling_params, name):
                where = f"sampling_params.{name}"
                raise invalid(where, "is not supported", NotSupported)
        if self.sampling_params.use_beam_search:
            where = "sampling_params.use_beam_search"
            raise NotSupported("beam search is not supported by generate", param=where)


class AbortRequest(Bounded, extra="allow", strict=True):
    """The body of /inference/v1/abort_requests."""

    request_ids: list[Annotated[str, Field(min_length=1)]]


def with_own_names(error: TokenMeshError) -> TokenMeshError:
    """The error with the names of a GenerateRequest: `token_ids` for `prompt`, and
    `sampling_params` before sampling fields."""
    root = (error.param or "").partition(".")[0]
    if root == "prompt":
        param = "token_ids"
    elif root in GenerateSampling.model_fields and root not in GenerateRequest.model_fields:
        param = f"sampling_params.{error.param}"
    else:
        return error
    renamed = copy.copy(error)
    renamed.param = param
    return renamed
