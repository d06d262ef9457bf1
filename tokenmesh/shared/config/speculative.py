"""SpeculativeConfig: how a model's next tokens are guessed before they are computed."""

from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tokenmesh.shared.config.draft_tree import DraftTree

SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]

METHODS: Final = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
_DRAFTED: Final = ("draft_model", "eagle", "eagle3", "mtp")
"""Those by which a model or a head drafts."""
_ALIASES: Final = (
    *("deepseek_mtp", "exaone_moe_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("qwen3_5_mtp", "qwen3_next_mtp"),
)
"""Names of mtp by the model's family, as vLLM takes them; the checkpoint says which it is."""
_OTHERS: Final = (
    *("dflash", "ernie_mtp", "extract_hidden_states", "longcat_flash_mtp", "medusa", "mimo_mtp"),
    *("mlp_speculator", "ngram_gpu", "pangu_ultra_moe_mtp"),
)
"""Methods of vLLM that need a second model, or more of the first one than its tokens."""
PROBABILISTIC: Final = "probabilistic"
"""The method of rejection sampling by which sampled streams keep their distribution only."""
_LOOKUP_MODELS: Final = ("ngram", "[ngram]")
"""These are what vLLM takes as `model` in place of the method."""
_LOOKUP_MIN: Final = 2
_LOOKUP_MAX: Final = 5
_NUM_TOKENS: Final = 8
"""Drafts of a row in a step where the config names no number."""
_NUM_DRAFTED: Final = 3
"""The same where a model computes them."""
_MAX_PREDICTED: Final = 8
"""Rows with states of a step with predictions where no method is set: of each the step copies the
states, for which such a worker has that much memory."""
MAX_TOKENS: Final = 64
"""Most drafts of a row in a step: a row's positions are a part of the step's memory."""


class SpeculativeConfig(BaseModel):
    """Names and meanings are those of vLLM's config of the same name. A stream has the same tokens
    with and without it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: SpeculativeMethod | None = Field(
        default=None,
        description="ngram: drafts are what followed the same tokens earlier in the stream or its "
        "prompt. suffix: also in earlier streams of the tenant. draft_model: what a smaller model "
        "draws. eagle, eagle3: what a head guesses from the model's hidden states. mtp: what the "
        "model's own layer for further tokens guesses. Default: what the name of `model` says, "
        "else draft_model; without `model` no drafts.",
    )
    model: str | None = Field(
        default=None,
        description="The model or head that drafts, as a directory, a GGUF file or a hub id; it "
        "has the vocabulary of the served model, which it is itself for mtp. ngram may be written "
        "here in place of in method.",
    )
    revision: str | None = Field(default=None, description="Of `model` on the hub.")
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=8,
        description="eagle3: layers whose inputs the head reads. Default: those that its config "
        "names, else 2, the middle one and the last but two.",
    )
    speculative_token_tree: str | None = Field(
        default=None,
        description="Drafts of a model that branch: each as a tuple that says which of the "
        "likeliest it is in its place, and before it the same of those that it follows, as in "
        "[(0,), (0, 0), (1,)]. Default: one draft for each place.",
    )
    allow_more_than_trained: bool = Field(
        default=False,
        description="Take more drafts than a head says that it was trained for.",
    )
    draft_tensor_parallel_size: int = Field(
        default=1, ge=1, le=1, description="The model that drafts is whole on each worker: 1."
    )
    num_speculative_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TOKENS,
        description="Most drafts of one stream in one step; how many there are follows from what "
        f"they save. Default: {_NUM_TOKENS}, and {_NUM_DRAFTED} where a model drafts.",
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
        description="standard or strict: a draft is kept where the stream draws the same token, "
        "which a model that drafts draws with the same noise. probabilistic: a model drafts with "
        "a noise of its own, and its drafts are kept or replaced by rejection sampling: sampled "
        "streams have the same distribution as without drafts, not the same tokens.",
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
        raise ValueError(f"{_listed(METHODS)}: method {value} {why}")

    @field_validator("rejection_sample_method")
    @classmethod
    def _keeps_streams(cls, value: str | None) -> str | None:
        if value not in (None, "standard", "strict", PROBABILISTIC):
            raise ValueError(
                f"standard, strict or {PROBABILISTIC}: {value} is not implemented, and a stream "
                "would have another distribution"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _find_method(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        method, model = given.get("method"), given.get("model")
        if method is None and model is not None:
            method = "ngram" if model in _LOOKUP_MODELS else _method_of(str(model))
            given = {**given, "method": method}
        if method in _ALIASES:
            method = "mtp"
            given = {**given, "method": method}
        if method not in (None, *METHODS):
            return {"method": method}  # whatever else is there belongs to it
        is_lookup = model in _LOOKUP_MODELS
        if method in _DRAFTED and (is_lookup or (model is None and method != "mtp")):
            raise ValueError(f"with model, for method {method}: the model that drafts")
        if method not in _DRAFTED and model is not None and not is_lookup:
            raise ValueError(f"without model {model}, for method {method}")
        others = sorted(given.keys() - cls.model_fields.keys())
        if others:
            known = ", ".join(cls.model_fields)
            raise ValueError(f"without {others[0]}: its keys are {known}")
        # services get all keys written out
        fields = cls.model_fields
        if method is None and any(given[key] not in (None, fields[key].default) for key in given):
            raise ValueError(f"with a method: {_listed(METHODS)}")
        return given

    @model_validator(mode="after")
    def _has_lengths(self) -> Self:
        least, most = self.lookup
        if least > most:
            raise ValueError(f"without prompt_lookup_min {least} above prompt_lookup_max {most}")
        return self

    @model_validator(mode="after")
    def _has_a_tree(self) -> Self:
        if self.speculative_token_tree is None:
            return self
        tree = DraftTree.of(self.speculative_token_tree)
        if not self.is_drafted:
            raise ValueError(f"without speculative_token_tree, for method {self.method}")
        count = len(tree.paths)
        if count > MAX_TOKENS:
            raise ValueError(f"with at most {MAX_TOKENS} drafts in speculative_token_tree")
        if self.num_speculative_tokens not in (None, count):
            raise ValueError(
                f"with num_speculative_tokens {count}, the drafts of speculative_token_tree, "
                f"not {self.num_speculative_tokens}"
            )
        if not tree.is_chain and self.rejection_sample_method == PROBABILISTIC:
            raise ValueError(f"without speculative_token_tree, for {PROBABILISTIC} verification")
        return self

    @property
    def tree(self) -> DraftTree | None:
        """None: drafts do not branch."""
        if self.speculative_token_tree is None:
            return None
        tree = DraftTree.of(self.speculative_token_tree)
        return None if tree.is_chain else tree

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens of an n-gram."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None and most is None:
            return _LOOKUP_MIN, _LOOKUP_MAX
        return (least or most or 1), (most or least or 1)

    @property
    def is_drafted(self) -> bool:
        """Return whether a model or a head drafts."""
        return self.method in _DRAFTED

    @property
    def has_head(self) -> bool:
        """Return whether a head drafts, which reads the model's embeddings and logits."""
        return self.is_drafted and self.method != "draft_model"

    @property
    def draws_apart(self) -> bool:
        """Return whether the probabilities of drafts are kept until they are verified."""
        return self.is_drafted and self.rejection_sample_method == PROBABILISTIC

    def max_rows(self, num_rows: int, *, has_states: bool) -> int:
        """Return how many of so many rows may have drafts in a step. has_states: of the model."""
        if self.method is None and has_states:
            return min(num_rows, _MAX_PREDICTED)
        return min(num_rows, self.disable_by_batch_size or num_rows)

    @property
    def max_drafts(self) -> int:
        """Return the most drafts of a row in a step."""
        if self.speculative_token_tree is not None:
            return len(DraftTree.of(self.speculative_token_tree).paths)
        return self.num_speculative_tokens or (_NUM_DRAFTED if self.is_drafted else _NUM_TOKENS)


def _method_of(model: str) -> str:
    """By its name, as vLLM has it."""
    if "eagle3" in model.lower():
        return "eagle3"
    return "eagle" if "eagle-" in model.lower() else "draft_model"


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
