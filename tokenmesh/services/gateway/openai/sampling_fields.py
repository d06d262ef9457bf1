"""SamplingFields: what chat and plain completions have in common, checked field by field.

Types are strict: a number in a string is a mistake of the client that is better told than guessed.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenmesh.services.gateway.openai.rule_fields import RepetitionDetection
from tokenmesh.services.gateway.openai.structured_fields import ResponseFormat, StructuredOutputs

INT32_MAX = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StreamOptions(BaseModel):
    """What a stream tells besides text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(BaseModel):
    """Names, ranges and meanings are vLLM's. None: the model's default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=INT32_MAX)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=INT32_MAX)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool = False
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    prompt_logprobs: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    logprob_token_ids: list[TokenId] | None = Field(default=None, min_length=1)
    thinking_token_budget: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    repetition_detection: RepetitionDetection | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(default=None, ge=1, le=INT32_MAX)
    echo: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = Field(default=0, ge=-INT32_MAX, le=INT32_MAX)
    request_id: str | None = Field(default=None, min_length=1)
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    session_id: str | None = Field(default=None, max_length=256)
    metadata: dict[str, Any] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Known and not served yet: see not_supported.py.
    watermarking: Any = None
    return_token_offsets: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_mm_kwargs: bool | None = None
    mm_payload: str = "tensors"
    routed_experts_prompt_start: int = 0

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
