"""Bodies of /inference/v1/generate and /inference/v1/abort_requests, with vLLM's field names."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.openai.lenient import (
    MinusOneOrMore,
    NotNegative,
    On,
    Positive,
    Priority,
)
from tokenmesh.services.gateway.openai.sampling_fields import (
    SamplingFields,
    StreamOptions,
    TokenId,
)
from tokenmesh.shared.messages.sampling import ThinkingBudget

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
"""Fields of a chat's body besides its sampling fields."""
_NOT_SERVED: Final = ("features", "content_parts", "ec_transfer_params")
_SAMPLING_NOT_SERVED: Final = (
    "extra_args",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "skip_reading_prefix_cache",
    "trace_decode_token_ids",
)


class GenerateSampling(SamplingFields):
    """vLLM's SamplingParams. An absent field is neutral; `max_tokens`: as many as fit."""

    max_tokens: Positive | None = None
    logprobs: MinusOneOrMore | None = None
    detokenize: On = True

    # Written by vLLM's renderer, without effect on the answer.
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


class ThinkingRule(BaseModel):
    """`ThinkingBudget` as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_tokens: NotNegative
    is_open: bool = False
    num_spent: NotNegative = 0
    start_ids: list[TokenId] = Field(default=[], max_length=_MAX_SEQUENCE_TOKENS)
    end_ids: _Sequence
    other_ends: list[_Sequence] = Field(default=[], max_length=_MAX_SEQUENCES)

    @property
    def budget(self) -> ThinkingBudget:
        """What a worker takes."""
        return ThinkingBudget(**self.model_dump())


class RenderedPrompt(BaseModel):
    """What the renderer has derived with the tokenizer, so that generate needs none."""

    model_config = ConfigDict(extra="forbid", strict=True)

    bad_words_token_ids: list[_Sequence] | None = Field(default=None, max_length=_MAX_SEQUENCES)
    reasoning_end_token_ids: list[_Sequence] | None = Field(default=None, max_length=64)
    """The constraint of structured_outputs holds after the first of these; empty: at once."""
    thinking: ThinkingRule | None = None

    @property
    def highest_id(self) -> int:
        """Of all ids."""
        thinking = self.thinking
        sequences = [*(self.bad_words_token_ids or ()), *(self.reasoning_end_token_ids or ())]
        if thinking is not None:
            sequences += [thinking.start_ids, thinking.end_ids, *thinking.other_ends]
        return max((token_id for ids in sequences for token_id in ids), default=0)


class ReasoningParserKwargs(BaseModel):
    """What the prompt's template was given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    chat_template_kwargs: dict[str, Any] = {}


class GenerateRequest(Bounded):
    """The body of /inference/v1/generate: what the render routes answer."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

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
        """All that a chat's sampling fields say, in one place."""
        outer = {name: getattr(self, name) for name in _OUTER if name in self.model_fields_set}
        # The prompt's log-probabilities go with a stream here: derender needs them for an echo.
        only_here = {"prompt_logprobs": None, "truncate_prompt_tokens": None, "echo": False}
        return self.sampling_params.model_copy(update=only_here | outer)

    def refuse_not_served(self) -> None:
        """Raise NotSupported for the first field that asks for what no version can do yet."""
        for name in _NOT_SERVED:
            if getattr(self, name):
                raise NotSupported(f"{name} is not supported", param=name)
        for name in _SAMPLING_NOT_SERVED:
            if getattr(self.sampling_params, name):
                where = f"sampling_params.{name}"
                raise NotSupported(f"{where} is not supported", param=where)
        if self.sampling_params.use_beam_search:
            where = "sampling_params.use_beam_search"
            raise NotSupported("beam search is not supported by generate", param=where)


class AbortRequest(Bounded):
    """The body of /inference/v1/abort_requests."""

    model_config = ConfigDict(extra="allow", strict=True)

    request_ids: list[Annotated[str, Field(min_length=1)]]
