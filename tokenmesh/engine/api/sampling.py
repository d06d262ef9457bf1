"""SamplingParams: how a worker chooses tokens. Names and meanings are vLLM's."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from tokenmesh.engine.api.structured import Structured


class Range(NamedTuple):
    """Finite numbers from `low` to `high`, which is one of them."""

    low: float
    high: float
    is_low_open: bool = False
    """True where `low` is excluded."""

    def holds(self, number: float) -> bool:
        """False for NaN as well."""
        return self.low <= number <= self.high and not (self.is_low_open and number == self.low)

    def __str__(self) -> str:
        return f"{'(' if self.is_low_open else '['}{self.low:g}, {self.high:g}]"


RANGES: Final[Mapping[str, Range]] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, is_low_open=True),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 100, is_low_open=True),
}
"""Values that the fields of `SamplingParams` may have, for clients and on the bus."""
MAX_LOGPROB_TOKEN_IDS: Final = 1024
MAX_REPETITION_PATTERN: Final = 1024
"""Largest `RepetitionRule.max_size`."""


class RepetitionRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ends a stream whose last tokens are repetitions of one pattern."""

    max_size: int
    """Tokens of the longest pattern."""
    min_size: int = 1
    min_count: int = 2
    """Repetitions in a row."""


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ends reasoning after a number of tokens by drawing the marker that ends it."""

    num_tokens: int
    """Reasoning tokens of the whole output and of the block that the prompt leaves open."""
    is_open: bool = False
    """True where the output begins with reasoning."""
    num_spent: int = 0
    """Reasoning tokens that the prompt ends with."""
    start_ids: list[int] = []
    """The marker before reasoning; empty: none."""
    end_ids: list[int]
    """The marker after it."""
    other_ends: list[list[int]] = []
    """Further sequences that end reasoning, such as the beginning of a call."""


class SpeechRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens that a model of whisper's kind may not draw; ids are token ids."""

    suppress_ids: list[int] = []
    """Never."""
    begin_suppress_ids: list[int] = []
    """Not as the first token."""
    end_id: int = -1
    """Ends a transcript; larger ids are not text."""
    no_timestamps_id: int = -1
    first_timestamp_id: int = -1
    """With timestamps: those have to come in pairs and may not decrease. -1: without timestamps."""
    max_initial_timestamp: int = -1
    """Number of the latest timestamp that an output may begin with; -1: any."""
    align_from: int = 0
    """The first token of a transcript in the prompt, with `align_states`."""
    align_states: int = 0
    """States of the encoder that are of the recording: the transcript in the prompt is aligned with
    them, see `Delta.alignment`. 0: it is not."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Both a gateway and a worker check `RANGES`, and a worker what it could not compute.

    `seed` is always set: without one from the client the gateway draws it, so that a migrated
    stream draws the same tokens. Each choice of a request with n > 1 has its own seed.
    """

    seed: int
    max_tokens: int
    """Output tokens at most, including those of earlier attempts."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words_ids: list[list[int]] = []
    """Token sequences: the last token is banned after the ones before it."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off. k >= 0: the sampled token's log-probability and the k most likely."""
    logprob_token_ids: list[int] = []
    """With `logprobs`: log-probabilities of these tokens instead of the most likely ones."""
    prompt_logprobs: int | None = None
    structured: Structured | None = None
    """The constraint on the output."""
    repetition: RepetitionRule | None = None
    thinking: ThinkingBudget | None = None
    speech: SpeechRule | None = None

    @property
    def ignores_eos(self) -> bool:
        """False with a constraint: after its end only the end token can be drawn."""
        return self.ignore_eos and self.structured is None
