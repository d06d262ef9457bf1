"""What sampling parameters a worker takes: the limits of vLLM's own validation."""

from collections.abc import Iterable
from typing import Final

from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.sampling import SamplingParams

MAX_MARKER_IDS: Final = 32
"""Tokens of a marker that begins or ends reasoning."""
MAX_OTHER_ENDS: Final = 4
"""Further markers that end it."""
_MAX_LOGPROB_TOKEN_IDS: Final = 1024
_MAX_PATTERN_SIZE: Final = 1024
_MAX_COUNT: Final = 2**30

_RANGES: Final = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (1e-9, 1e6),
}
"""Finite and inclusive; the API's narrower ranges are the gateway's to check."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidInput that names the first field at fault."""
    if sampling.max_tokens < 1:
        raise InvalidInput(f"max_tokens is {sampling.max_tokens}, not positive", param="max_tokens")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidInput(
            f"min_tokens is {sampling.min_tokens}, not in [0, max_tokens]", param="min_tokens"
        )
    if sampling.top_k < 0:
        raise InvalidInput(f"top_k is {sampling.top_k}, not in [0, ...)", param="top_k")
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        # also false for NaN
        if not low <= value <= high:
            raise InvalidInput(f"{name} is {value}, not in [{low:g}, {high:g}]", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise InvalidInput(f"{name} is {count}, not in [0, {vocab_size}]", param=name)
    _check_ids(sampling, vocab_size)
    _check_named(sampling, vocab_size)
    _check_repetition(sampling)
    _check_thinking(sampling, vocab_size)


def _check_ids(sampling: SamplingParams, vocab_size: int) -> None:
    _check_range("logit_bias", sampling.logit_bias, vocab_size)
    for token, bias in sampling.logit_bias.items():
        if not -1e9 <= bias <= 1e9:
            raise InvalidInput(f"logit_bias of {token} is {bias}", param="logit_bias")
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise InvalidInput("allowed_token_ids is empty", param="allowed_token_ids")
        _check_range("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for word in sampling.bad_words_ids:
        if not word:
            raise InvalidInput("bad_words_ids holds an empty word", param="bad_words_ids")
        _check_range("bad_words_ids", word, vocab_size)


def _check_named(sampling: SamplingParams, vocab_size: int) -> None:
    named = sampling.logprob_token_ids
    if not named:
        return
    if sampling.logprobs is None or len(named) > _MAX_LOGPROB_TOKEN_IDS:
        raise InvalidInput(
            f"logprob_token_ids needs logprobs and at most {_MAX_LOGPROB_TOKEN_IDS} ids",
            param="logprob_token_ids",
        )
    _check_range("logprob_token_ids", named, vocab_size)


def _check_repetition(sampling: SamplingParams) -> None:
    rule = sampling.repetition
    if rule is not None and not (
        1 <= rule.min_size <= rule.max_size <= _MAX_PATTERN_SIZE
        and 2 <= rule.min_count <= _MAX_COUNT
    ):
        raise InvalidInput(f"repetition is {rule}, which is out of range", param="repetition")


def _check_thinking(sampling: SamplingParams, vocab_size: int) -> None:
    budget = sampling.thinking
    if budget is None:
        return
    for count in (budget.num_tokens, budget.num_spent):
        if not 0 <= count <= _MAX_COUNT:
            raise InvalidInput(f"a number of thinking is {count}", param="thinking")
    ends = [budget.end_ids, *budget.other_ends]
    lengths = [len(budget.start_ids) or 1, *map(len, ends)]
    if not 1 <= min(lengths) <= max(lengths) <= MAX_MARKER_IDS or len(ends) > 1 + MAX_OTHER_ENDS:
        raise InvalidInput(
            f"thinking holds a marker that has not 1 to {MAX_MARKER_IDS} ids, or more than "
            f"{MAX_OTHER_ENDS} further ends",
            param="thinking",
        )
    for marker in (budget.start_ids, *ends):
        _check_range("thinking", marker, vocab_size)


def _check_range(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidInput(
                f"{name} holds the id {token}; the model has {vocab_size} ids", param=name
            )
