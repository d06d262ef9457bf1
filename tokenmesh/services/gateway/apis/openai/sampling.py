"""From request fields to SamplingParams and BeamOptions, and checks over several fields.

Every refusal names its field. What depends on the prompt's length is checked after tokenizing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from tokenmesh.services.gateway.apis.openai.sampling_checks import SamplingScope, count_logprobs
from tokenmesh.services.gateway.apis.openai.sampling_fields import (
    SAMPLED,
    NotServed,
    NotWithBeams,
    SamplingFields,
    marked,
)
from tokenmesh.services.gateway.apis.openai.structured import read_structured
from tokenmesh.services.gateway.core.generation.parsing import Parsing, ReasoningBudget
from tokenmesh.services.gateway.core.generation.request import BeamOptions
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import SEED_BITS
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import BAD_WORDS_CHARS

MAX_BEAM_WIDTH: Final = 16
"""Largest n with use_beam_search."""
MAX_STOP_CHARS: Final = 256
"""Length of one stop string."""

_SEED_MASK: Final = (1 << SEED_BITS) - 1
_SHOWN_CHARS: Final = 80


def to_sampling(
    body: SamplingFields,
    defaults: Mapping[str, object],
    scope: SamplingScope,
    *,
    seed: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    logprobs_field: str,
) -> SamplingParams:
    """`defaults` are the model's; `seed` is for a request without one. Raises InvalidInput.

    The pipeline fills in `max_tokens`, which is 1 here, and `bad_words_ids`. `structured` is not
    checked, since that may take long.
    """
    is_constrained = body.response_format is not None or body.structured_outputs is not None
    values: dict[str, Any] = {}
    for name, field in SAMPLED.items():
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[field.wire_name or name] = field.read(value, scope) if field.read else value
    return SamplingParams(
        seed=(seed if body.seed is None else body.seed) & _SEED_MASK,
        max_tokens=1,
        logprobs=None if logprobs is None else count_logprobs(logprobs_field, logprobs, scope),
        prompt_logprobs=(
            None
            if prompt_logprobs is None
            else count_logprobs("prompt_logprobs", prompt_logprobs, scope)
        ),
        structured=(
            read_structured(body.response_format, body.structured_outputs)
            if is_constrained
            else None
        ),
        **values,
    )


def check_fields(body: SamplingFields, max_tokens: int | None, limits: GatewaySettings) -> None:
    """Check what does not depend on the model. Raises InvalidInput."""
    refuse_not_served(body)
    if body.n is not None and body.n > limits.max_n:
        raise invalid("n", f"is {body.n}, at most {limits.max_n} (gateway.max_n)")
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {body.min_tokens}, more than max_tokens ({max_tokens})")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "cannot be combined with stream")
    if body.truncate_prompt_tokens == 0:
        raise invalid(
            "truncate_prompt_tokens", "is 0; it must be at least 1, or -1 for as many tokens as fit"
        )
    if body.stop is not None:
        _check_stops(body.stops, limits)
    for index, word in enumerate(body.bad_words or ()):
        if not word:
            raise InvalidInput(f"bad_words[{index}] is empty", param="bad_words")
    num_chars = sum(map(len, body.bad_words or ()))
    if num_chars > BAD_WORDS_CHARS:
        raise invalid("bad_words", f"holds {num_chars} characters, at most {BAD_WORDS_CHARS}")


def _check_stops(stops: Sequence[str], limits: GatewaySettings) -> None:
    if len(stops) > limits.max_stop_strings:
        raise invalid(
            "stop",
            f"holds {len(stops)} strings, at most {limits.max_stop_strings} "
            "(gateway.max_stop_strings)",
        )
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidInput(f"stop[{index}] is empty", param="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidInput(
                f"stop[{index}] has {len(stop)} characters, at most {MAX_STOP_CHARS}",
                param="stop",
            )


def refuse_not_served(body: BaseModel) -> None:
    """Raise NotSupported for a field that is known and cannot be served."""
    not_served = marked(type(body), NotServed)
    for name in not_served.keys() & body.model_fields_set:
        value, field = getattr(body, name), not_served[name]
        if not field.allows(value):
            is_short = isinstance(value, str) and len(value) < _SHOWN_CHARS
            shown = f" {value!r}" if is_short or isinstance(value, int | float) else ""
            hint = field.hint or "is not supported yet"
            raise NotSupported(f"{name}{shown} {hint}", param=name)


def read_budget(given: int | None, parsing: Parsing) -> ReasoningBudget | None:
    """None for -1, which means without a limit.

    Raises InvalidInput for a model whose reasoning has no end marker.
    """
    if given is None or given == -1:
        return None
    if not parsing.family.can_cut_reasoning:
        raise invalid(
            "thinking_token_budget",
            "needs a model whose reasoning has an end marker; this one has "
            "no such reasoning parser",
        )
    return ReasoningBudget(given, parsing)


def beam_options(body: SamplingFields, card: ModelCard) -> BeamOptions | None:
    """Return how to search; None without `use_beam_search`. Raises InvalidInput."""
    if not body.use_beam_search:
        if body.length_penalty != 1.0:
            raise invalid("length_penalty", "needs use_beam_search to be true")
        return None
    if body.stream:
        raise invalid("stream", "cannot be combined with use_beam_search")
    _check_goes_with_beams(body)
    width, widest = body.n or 1, min(MAX_BEAM_WIDTH, card.vocab_size)
    if width > widest:
        raise invalid("n", f"is {width}, at most {widest} with use_beam_search")
    return BeamOptions(
        width=width,
        length_penalty=body.length_penalty,
        end_ids=frozenset() if body.ignore_eos else frozenset(card.eos_token_ids),
        stop_ids=frozenset(body.stop_token_ids or ()),
    )


def _check_goes_with_beams(body: SamplingFields) -> None:
    fields = type(body).model_fields
    for name, field in marked(type(body), NotWithBeams).items():
        value = getattr(body, name)
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_none=True)
        if value != fields[name].default and value not in field.values:
            raise invalid(name, "cannot be combined with use_beam_search")
    # The echo would need the prompt's log-probabilities, which a search does not request.
    if body.echo and getattr(body, "logprobs", None) is not None:
        raise InvalidInput(
            "echo with logprobs cannot be combined with use_beam_search", param="echo"
        )
