"""Fields that are rules about an output's tokens, as workers take them: repetition, named tokens.

Every refusal names its field.
"""

from typing import Final

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.generation.parsing import Parsing
from tokenmesh.services.gateway.generation.reasoning_budget import ReasoningBudget
from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.sampling import RepetitionRule

_INT32_MAX: Final = 2**31 - 1


class RepetitionDetection(Bounded):
    """vLLM's: an output ends when its last tokens are one pattern `min_count` times in a row."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: int = Field(default=0, ge=0, le=_INT32_MAX)
    """0 turns it off."""
    min_pattern_size: int = Field(default=0, ge=0, le=_INT32_MAX)
    """0 is 1."""
    min_count: int = Field(default=0, ge=0, le=_INT32_MAX)


def repetition_rule(
    asked: RepetitionDetection | None, limits: GatewaySettings
) -> RepetitionRule | None:
    """The worker's rule; None when there is nothing to look for. Raises InvalidInput."""
    if asked is None:
        return None
    if asked.min_pattern_size > asked.max_pattern_size:
        raise _wrong("min_pattern_size", "is larger than max_pattern_size")
    if asked.max_pattern_size == 0:
        return None
    if asked.max_pattern_size > limits.max_repetition_pattern:
        raise _wrong("max_pattern_size", f"is over the limit of {limits.max_repetition_pattern}")
    if asked.min_count < 2:
        raise _wrong("min_count", f"is {asked.min_count}, at least 2")
    return RepetitionRule(
        max_size=asked.max_pattern_size,
        min_size=max(1, asked.min_pattern_size),
        min_count=asked.min_count,
    )


def read_budget(asked: int | None, parsing: Parsing) -> ReasoningBudget | None:
    """-1 is no limit. Raises InvalidInput for a model whose reasoning has no end."""
    if asked is None or asked == -1:
        return None
    if not parsing.family.can_cut_reasoning:
        raise InvalidInput(
            "thinking_token_budget needs a model whose reasoning has an end marker; this one has "
            "no such reasoning parser",
            param="thinking_token_budget",
        )
    return ReasoningBudget(asked, parsing)


def check_named_tokens(
    token_ids: list[int], vocab_size: int, limits: GatewaySettings, *, has_logprobs: bool
) -> None:
    """Whether `logprob_token_ids` can be served. Raises InvalidInput."""
    name = "logprob_token_ids"
    if not has_logprobs:
        raise InvalidInput(f"{name} needs logprobs to be asked for", param=name)
    if len(token_ids) > limits.max_logprob_token_ids:
        limit = limits.max_logprob_token_ids
        raise InvalidInput(f"{name} holds {len(token_ids)} ids, at most {limit}", param=name)
    if max(token_ids) >= vocab_size:
        raise out_of_vocabulary(name, max(token_ids), vocab_size)


def out_of_vocabulary(name: str, token_id: int, vocab_size: int) -> InvalidInput:
    """The error for a token id that the model does not have."""
    return InvalidInput(
        f"{name}: token id {token_id} is out of vocabulary (0 to {vocab_size - 1})", param=name
    )


def count_logprobs(name: str, asked: int | None, vocab_size: int, limit: int) -> int | None:
    """How many log-probabilities; -1 asks for the whole vocabulary's. Raises InvalidInput."""
    if asked is None:
        return None
    count = vocab_size if asked == -1 else asked
    if limit != -1 and count > limit:
        shown = f"-1, all {count} tokens" if asked == -1 else str(count)
        raise InvalidInput(f"{name} is {shown}, at most {limit}", param=name)
    return min(count, vocab_size)


def _wrong(name: str, what: str) -> InvalidInput:
    return InvalidInput(f"repetition_detection.{name} {what}", param=f"repetition_detection.{name}")
