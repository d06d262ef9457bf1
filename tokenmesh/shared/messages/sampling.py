"""SamplingParams: how a worker chooses tokens, as the engine takes it."""

from tokenmesh.engine.api.sampling import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REPETITION_PATTERN,
    RANGES,
    Range,
    RepetitionRule,
    SamplingParams,
    SpeechRule,
    ThinkingBudget,
)

__all__ = [
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_REPETITION_PATTERN",
    "RANGES",
    "Range",
    "RepetitionRule",
    "SamplingParams",
    "SpeechRule",
    "ThinkingBudget",
]
