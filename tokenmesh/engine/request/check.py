"""Checks of what is requested: a request that passes them cannot harm the engine."""

from collections.abc import Iterable
from typing import Final

import msgspec

from tokenmesh.engine.api.sampling import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_REPETITION_PATTERN,
    RANGES,
    SamplingParams,
)
from tokenmesh.engine.plan import MAX_MARKER_IDS, MAX_OTHER_ENDS
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.ids import SEED_BITS


def check_length(
    num_prompt: int, max_tokens: int, max_model_len: int, num_blocks: int, block_size: int
) -> None:
    """Raises PromptTooLong where the model, or a pool of so many blocks, holds fewer tokens."""
    total = num_prompt + max_tokens
    if total > max_model_len:
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} are {total} tokens; the "
            f"model's context holds {max_model_len}",
            param="max_tokens",
        )
    # the last token is never computed
    room = (num_blocks - 1) * block_size + 1
    if total > room:
        raise PromptTooLong(
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} are {total} tokens; this "
            f"worker's KV cache holds {room}",
            param="max_tokens",
        )


def in_range(sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same meaning in numbers that fit a tensor: any seed, top_k and stop token is allowed, and
    whatever is above 0 where 0 is not."""
    seed = sampling.seed & ((1 << SEED_BITS) - 1)
    top_k = 0 if sampling.top_k >= vocab_size else sampling.top_k
    stops = [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]
    return msgspec.structs.replace(
        sampling,
        seed=seed,
        top_k=top_k,
        stop_token_ids=stops,
        top_p=max(sampling.top_p, _LEAST),
        repetition_penalty=max(sampling.repetition_penalty, _LEAST),
    )


_LEAST: Final = 1e-9
"""Logits that are divided by less overflow."""

_MAX_COUNT: Final = 2**30


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
    for name, allowed in RANGES.items():
        value = getattr(sampling, name)
        if not allowed.holds(value):
            raise InvalidInput(f"{name} is {value}, not in {allowed}", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= vocab_size:
            raise InvalidInput(f"{name} is {count}, not in [0, {vocab_size}]", param=name)
    _check_sampled_ids(sampling, vocab_size)
    _check_named(sampling, vocab_size)
    _check_repetition(sampling)
    _check_thinking(sampling, vocab_size)
    if (rule := sampling.speech) is not None:
        ids = [rule.end_id, rule.no_timestamps_id, rule.first_timestamp_id]
        times = ids if rule.first_timestamp_id >= 0 else []
        _check_range("speech", [*rule.suppress_ids, *rule.begin_suppress_ids, *times], vocab_size)


def _check_sampled_ids(sampling: SamplingParams, vocab_size: int) -> None:
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
    if sampling.logprobs is None or len(named) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidInput(
            f"logprob_token_ids needs logprobs and at most {MAX_LOGPROB_TOKEN_IDS} ids",
            param="logprob_token_ids",
        )
    _check_range("logprob_token_ids", named, vocab_size)


def _check_repetition(sampling: SamplingParams) -> None:
    rule = sampling.repetition
    if rule is not None and not (
        1 <= rule.min_size <= rule.max_size <= MAX_REPETITION_PATTERN
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
