"""Checks of sampling fields against the model and the limits, and what workers get of them.

Every refusal names its field.
"""

from dataclasses import dataclass
from typing import Final

from pydantic import Field

from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.fields import INT32_MAX, Bounded
from tokenmesh.services.gateway.core.http.id_lists import check_vocabulary
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.sampling import RepetitionRule

MAX_STOP_TOKEN_IDS: Final = 1024
"""stop_token_ids of a request."""
MAX_LOGPROB_TOKEN_IDS: Final = 128
"""Ids of logprob_token_ids."""
MAX_REPETITION_PATTERN: Final = 256
"""Largest max_pattern_size of repetition_detection."""

_MAX_BIAS: Final = 100.0
_MAX_KEYS: Final = 64
"""Wrong keys of logit_bias that an error names."""
_MAX_KEY_CHARS: Final = 20


@dataclass(frozen=True, slots=True)
class SamplingScope:
    """It holds what the fields of a request are checked against."""

    vocab_size: int
    settings: GatewaySettings
    has_logprobs: bool
    """It tells whether the request has the field `logprobs`."""


class RepetitionDetection(Bounded, extra="forbid", strict=True):
    """vLLM's: an output ends when its last tokens are one pattern `min_count` times in a row."""

    max_pattern_size: int = Field(default=0, ge=0, le=INT32_MAX)
    """0 turns it off."""
    min_pattern_size: int = Field(default=0, ge=0, le=INT32_MAX)
    """0 is 1."""
    min_count: int = Field(default=0, ge=0, le=INT32_MAX)


def read_repetition(given: RepetitionDetection, scope: SamplingScope) -> RepetitionRule | None:
    """The worker's rule; None when it is turned off. Raises InvalidInput."""
    limit = MAX_REPETITION_PATTERN
    if given.min_pattern_size > given.max_pattern_size:
        raise _wrong_rule("min_pattern_size", "is larger than max_pattern_size")
    if given.max_pattern_size == 0:
        return None
    if given.max_pattern_size > limit:
        raise _wrong_rule("max_pattern_size", f"is over {limit}")
    if given.min_count < 2:
        raise _wrong_rule("min_count", f"is {given.min_count}, at least 2")
    return RepetitionRule(
        max_size=given.max_pattern_size,
        min_size=max(1, given.min_pattern_size),
        min_count=given.min_count,
    )


def _wrong_rule(name: str, problem: str) -> InvalidInput:
    field = f"repetition_detection.{name}"
    return invalid(field, problem)


def read_logit_bias(entries: dict[str, float], scope: SamplingScope) -> dict[int, float]:
    """By token id, within -100 and 100. Raises InvalidInput."""
    limit, vocab_size = scope.settings.max_logit_bias, scope.vocab_size
    if len(entries) > limit:
        raise invalid(
            "logit_bias", f"holds {len(entries)} entries, at most {limit} (gateway.max_logit_bias)"
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
    # int() also accepts "1_0", digits of other scripts and, slowly, thousands of digits.
    is_number = len(key) <= _MAX_KEY_CHARS and key.isascii() and key.isdigit()
    return is_number and int(key) < vocab_size


def check_allowed_ids(ids: list[int], scope: SamplingScope) -> list[int]:
    """Check and sort `allowed_token_ids`. Raises InvalidInput."""
    name = "allowed_token_ids"
    if not ids:
        raise invalid(name, "is empty")
    if len(ids) > scope.vocab_size:
        raise invalid(name, f"holds {len(ids)} ids, the model has {scope.vocab_size}")
    check_vocabulary(name, ids, scope.vocab_size)
    return sorted(set(ids))


def check_stop_ids(ids: list[int], scope: SamplingScope) -> list[int]:
    """Check `stop_token_ids`; they stay unchanged. Raises InvalidInput."""
    name, limit = "stop_token_ids", MAX_STOP_TOKEN_IDS
    if len(ids) > limit:
        raise invalid(name, f"holds {len(ids)} ids, at most {limit}")
    check_vocabulary(name, ids, scope.vocab_size)
    return ids


def check_named_ids(ids: list[int], scope: SamplingScope) -> list[int]:
    """Check `logprob_token_ids`; they stay unchanged. Raises InvalidInput."""
    name, limit = "logprob_token_ids", MAX_LOGPROB_TOKEN_IDS
    if not scope.has_logprobs:
        raise invalid(name, "needs logprobs")
    if len(ids) > limit:
        raise invalid(name, f"holds {len(ids)} ids, at most {limit}")
    check_vocabulary(name, ids, scope.vocab_size)
    return ids


def count_logprobs(name: str, given: int | None, scope: SamplingScope) -> int | None:
    """Return how many log-probabilities; -1 is the whole vocabulary's. Raises InvalidInput."""
    if given is None:
        return None
    count, limit = scope.vocab_size if given == -1 else given, scope.settings.max_logprobs
    if limit != -1 and count > limit:
        shown = f"-1, all {count} tokens" if given == -1 else str(count)
        raise invalid(name, f"is {shown}, at most {limit} (gateway.max_logprobs)")
    return min(count, scope.vocab_size)
