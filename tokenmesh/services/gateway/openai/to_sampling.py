"""From request fields to SamplingParams: defaults filled in, limits and ranges checked.

Every refusal names its field. What needs the prompt's length is checked after tokenizing.
"""

from collections.abc import Mapping
from typing import Final

from tokenmesh.services.gateway.openai.rule_fields import (
    check_named_tokens,
    count_logprobs,
    out_of_vocabulary,
    repetition_rule,
)
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields
from tokenmesh.services.gateway.openai.structured_output import read_structured
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import SEED_BITS
from tokenmesh.shared.messages.sampling import SamplingParams

_SEED_MASK: Final = (1 << SEED_BITS) - 1
_MAX_BIAS: Final = 100.0
_MAX_KEYS: Final = 64
"""Wrong keys of logit_bias that an error names."""
_MAX_KEY_CHARS: Final = 20

_NEUTRAL: Final[dict[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def to_sampling(
    body: SamplingFields,
    defaults: Mapping[str, object],
    vocab_size: int,
    limits: GatewaySettings,
    *,
    seed: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """`seed` is for a request that brings none.

    `max_tokens` is left at 1 and `bad_words_ids` empty: the pipeline fills them in; `structured` is
    not checked, which may take long. Raises InvalidInput.
    """
    named = body.logprob_token_ids or []
    if named:
        check_named_tokens(named, vocab_size, limits, has_logprobs=logprobs is not None)
    most = limits.max_logprobs
    numbers = {name: _number(body, defaults, name) for name in _NEUTRAL}
    return SamplingParams(
        seed=(seed if body.seed is None else body.seed) & _SEED_MASK,
        max_tokens=1,
        min_tokens=body.min_tokens,
        temperature=numbers["temperature"],
        top_p=numbers["top_p"],
        top_k=max(0, int(numbers["top_k"])),
        min_p=numbers["min_p"],
        presence_penalty=numbers["presence_penalty"],
        frequency_penalty=numbers["frequency_penalty"],
        repetition_penalty=numbers["repetition_penalty"],
        logit_bias=_logit_bias(body, vocab_size, limits),
        allowed_token_ids=_allowed_ids(body, vocab_size),
        stop_token_ids=_stop_ids(body, vocab_size, limits),
        ignore_eos=body.ignore_eos,
        logprobs=count_logprobs("logprobs", logprobs, vocab_size, most),
        logprob_token_ids=named,
        prompt_logprobs=count_logprobs("prompt_logprobs", prompt_logprobs, vocab_size, most),
        repetition=repetition_rule(body.repetition_detection, limits),
        structured=read_structured(body.response_format, body.structured_outputs),
    )


def check_limits(body: SamplingFields, max_tokens: int | None, limits: GatewaySettings) -> None:
    """What concerns a request as a whole. Raises InvalidInput."""
    if body.n is not None and body.n > limits.max_n:
        raise InvalidInput(f"n is {body.n}, at most {limits.max_n}", param="n")
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidInput(
            f"min_tokens is {body.min_tokens}, more than max_tokens ({max_tokens})",
            param="min_tokens",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidInput("prompt_logprobs does not go with stream", param="prompt_logprobs")
    if body.truncate_prompt_tokens == 0:
        raise InvalidInput(
            "truncate_prompt_tokens is 0, at least 1, or -1 for as many as there is room for",
            param="truncate_prompt_tokens",
        )
    _check_stops(body, limits)
    for index, word in enumerate(body.bad_words or ()):
        if not word:
            raise InvalidInput(f"bad_words[{index}] is empty", param="bad_words")


def _check_stops(body: SamplingFields, limits: GatewaySettings) -> None:
    if len(body.stops) > limits.max_stop_strings:
        raise InvalidInput(
            f"stop holds {len(body.stops)} strings, at most {limits.max_stop_strings}",
            param="stop",
        )
    for index, stop in enumerate(body.stops):
        if not stop:
            raise InvalidInput(f"stop[{index}] is empty", param="stop")
        if len(stop) > limits.max_stop_chars:
            raise InvalidInput(
                f"stop[{index}] has {len(stop)} characters, at most {limits.max_stop_chars}",
                param="stop",
            )


def _number(body: SamplingFields, defaults: Mapping[str, object], name: str) -> float:
    value = getattr(body, name)
    if value is None:
        value = defaults.get(name)
    return _NEUTRAL[name] if value is None else value


def _logit_bias(body: SamplingFields, vocab_size: int, limits: GatewaySettings) -> dict[int, float]:
    entries = body.logit_bias or {}
    if len(entries) > limits.max_logit_bias:
        raise InvalidInput(
            f"logit_bias holds {len(entries)} entries, at most {limits.max_logit_bias}",
            param="logit_bias",
        )
    wrong = [key for key in entries if not _is_id(key, vocab_size)]
    if wrong:
        shown = ", ".join(key[:_MAX_KEY_CHARS] for key in wrong[:_MAX_KEYS])
        raise InvalidInput(
            f"logit_bias: token_id(s) [{shown}] are out of vocabulary. "
            f"Vocabulary size: {vocab_size}",
            param="logit_bias",
        )
    return {int(key): max(-_MAX_BIAS, min(_MAX_BIAS, bias)) for key, bias in entries.items()}


def _is_id(key: str, vocab_size: int) -> bool:
    # int() would also take "1_0", digits of other scripts and, slowly, thousands of digits.
    is_number = len(key) <= _MAX_KEY_CHARS and key.isascii() and key.isdigit()
    return is_number and int(key) < vocab_size


def _allowed_ids(body: SamplingFields, vocab_size: int) -> list[int] | None:
    allowed = body.allowed_token_ids
    if allowed is None:
        return None
    if not allowed:
        raise InvalidInput("allowed_token_ids is empty", param="allowed_token_ids")
    if len(allowed) > vocab_size:
        raise InvalidInput(
            f"allowed_token_ids holds {len(allowed)} ids, the model has {vocab_size}",
            param="allowed_token_ids",
        )
    _check_ids(allowed, vocab_size, "allowed_token_ids")
    return sorted(set(allowed))


def _stop_ids(body: SamplingFields, vocab_size: int, limits: GatewaySettings) -> list[int]:
    ids = body.stop_token_ids or []
    if len(ids) > limits.max_stop_token_ids:
        raise InvalidInput(
            f"stop_token_ids holds {len(ids)} ids, at most {limits.max_stop_token_ids}",
            param="stop_token_ids",
        )
    _check_ids(ids, vocab_size, "stop_token_ids")
    return ids


def _check_ids(ids: list[int], vocab_size: int, name: str) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise out_of_vocabulary(name, highest, vocab_size)
