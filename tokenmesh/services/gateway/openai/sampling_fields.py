"""SamplingFields: what chat and plain completions have in common, checked field by field.

Types are strict: a number in a string is a mistake of the client that is better told than guessed.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.lenient import (
    Count,
    Flag,
    LengthPenalty,
    MinP,
    MinusOneOrMore,
    Off,
    On,
    Penalty,
    Positive,
    Priority,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopP,
    default_for_null,
)
from tokenmesh.services.gateway.openai.rule_fields import RepetitionDetection
from tokenmesh.services.gateway.openai.structured_fields import ResponseFormat, StructuredOutputs

TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StreamOptions(Bounded):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: Off = False
    continuous_usage_stats: Off = False


class SamplingFields(Bounded):
    """Names, ranges and meanings are vLLM's. None: the model's default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: MinusOneOrMore | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: Off = False
    ignore_eos: Off = False
    min_tokens: Count = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    use_beam_search: Off = False
    length_penalty: Annotated[LengthPenalty, default_for_null(LengthPenalty, 1.0)] = 1.0
    prompt_logprobs: MinusOneOrMore | None = None
    logprob_token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    thinking_token_budget: MinusOneOrMore | None = None
    repetition_detection: RepetitionDetection | None = None
    skip_special_tokens: On = True
    spaces_between_special_tokens: On = True
    truncate_prompt_tokens: MinusOneOrMore | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Positive | None = None
    echo: Off = False
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: Priority = 0
    request_id: str | None = Field(default=None, min_length=1)
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    session_id: str | None = Field(default=None, max_length=256)
    metadata: dict[str, Any] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Known and not served yet: see not_supported.py.
    watermarking: Any = None
    return_token_offsets: Off = False
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_mm_kwargs: Flag | None = None
    mm_payload: str | None = None
    routed_experts_prompt_start: int | None = None

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def unknown_fields(self) -> list[str]:
        """Names of top-level fields that no version knows."""
        return list(self.model_extra or ())
