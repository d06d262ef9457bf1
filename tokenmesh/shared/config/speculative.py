"""SpeculativeConfig: how a model's next tokens are guessed before they are computed."""

from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SpeculativeMethod = Literal["ngram", "suffix"]

METHODS: Final = ("ngram", "suffix")
_OTHERS: Final = (
    *("deepseek_mtp", "dflash", "draft_model", "eagle", "eagle3", "ernie_mtp", "exaone_moe_mtp"),
    *("extract_hidden_states", "glm4_moe_mtp", "longcat_flash_mtp", "medusa", "mimo_mtp"),
    *("mlp_speculator", "mtp", "ngram_gpu", "pangu_ultra_moe_mtp", "qwen3_5_mtp"),
    "qwen3_next_mtp",
)
"""Methods of vLLM that need a second model, or more of the first one than its tokens."""
_LOOKUP_MODELS: Final = ("ngram", "[ngram]")
"""What vLLM takes as `model` in place of the method."""
_LOOKUP_MIN: Final = 2
_LOOKUP_MAX: Final = 5
_NUM_TOKENS: Final = 8
"""Drafts of a row in a step where the config names no number."""
MAX_TOKENS: Final = 64
"""Most drafts of a row in a step: a row's positions are a part of the step's memory."""


class SpeculativeConfig(BaseModel):
    """Names and meanings are those of vLLM's config of the same name. A stream has the same tokens
    with and without it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: SpeculativeMethod | None = Field(
        default=None,
        description="ngram: drafts are what followed the same tokens earlier in the stream or its "
        "prompt. suffix: also in earlier streams of the tenant. Default: no drafts.",
    )
    model: str | None = Field(
        default=None, description="ngram may be written here in place of in method."
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENS,
        description="Most drafts of one stream in one step; how many there are follows from what "
        f"they save. Default: {_NUM_TOKENS}.",
    )
    prompt_lookup_min: int | None = Field(
        default=None,
        ge=1,
        le=32,
        description="ngram: fewest tokens that must be the same before a draft. Default: "
        f"prompt_lookup_max where that is set, else {_LOOKUP_MIN}.",
    )
    prompt_lookup_max: int | None = Field(
        default=None,
        ge=1,
        le=32,
        description="ngram: most tokens that are compared; the longest match counts. Default: "
        f"prompt_lookup_min where that is set, else {_LOOKUP_MAX}.",
    )
    disable_by_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="With more streams than this in a batch none has drafts. Default: no bound.",
    )
    rejection_sample_method: str | None = Field(
        default=None,
        description="standard or strict: a draft is kept where the stream draws the same token.",
    )
    suffix_decoding_max_tree_depth: int = Field(
        default=24, ge=2, le=64, description="suffix: most tokens of a match that are compared."
    )
    suffix_decoding_max_cached_requests: int = Field(
        default=1000,
        ge=0,
        description="suffix: streams of a tenant whose outputs are kept; 0: none, only the "
        "stream's own text is looked through.",
    )
    suffix_decoding_max_spec_factor: float = Field(
        default=1.0, gt=0, description="suffix: most drafts for each token of the match."
    )
    suffix_decoding_min_token_prob: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="suffix: taken without an effect; how often drafts of such matches were right "
        "decides how many there are.",
    )

    @field_validator("method", mode="before")
    @classmethod
    def _is_known(cls, value: object) -> object:
        if value is None or value in METHODS:
            return value
        why = "is not implemented" if value in _OTHERS else "is unknown"
        raise ValueError(f"{' or '.join(METHODS)}: method {value} {why}")

    @field_validator("rejection_sample_method")
    @classmethod
    def _keeps_streams(cls, value: str | None) -> str | None:
        if value not in (None, "standard", "strict"):
            raise ValueError(
                f"standard or strict: {value} is not implemented, and a stream's tokens would not "
                "stay the same"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _find_method(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        method, model = given.get("method"), given.get("model")
        if method is None and model in _LOOKUP_MODELS:
            return {**given, "method": "ngram"}
        if method not in (None, *METHODS):
            return {"method": method}  # whatever else is there belongs to it
        if model is not None and model not in _LOOKUP_MODELS:
            raise ValueError(f"without model: a draft model ({model}) is not implemented")
        others = sorted(given.keys() - cls.model_fields.keys())
        if others:
            known = ", ".join(cls.model_fields)
            raise ValueError(f"without {others[0]}: its keys are {known}")
        # services get all keys written out
        fields = cls.model_fields
        if method is None and any(given[key] not in (None, fields[key].default) for key in given):
            raise ValueError(f"with a method: {' or '.join(METHODS)}")
        return given

    @model_validator(mode="after")
    def _has_lengths(self) -> Self:
        least, most = self.lookup
        if least > most:
            raise ValueError(f"without prompt_lookup_min {least} above prompt_lookup_max {most}")
        return self

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens of an n-gram."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            return _LOOKUP_MIN, _LOOKUP_MAX
        return (least or most or 1), (most or least or 1)

    @property
    def max_drafts(self) -> int:
        """Of a row in a step."""
        return self.num_speculative_tokens or _NUM_TOKENS
