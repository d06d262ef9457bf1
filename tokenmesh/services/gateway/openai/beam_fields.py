"""use_beam_search: what goes with it and what does not. Every refusal names its field."""

from typing import Any, Final

from pydantic import BaseModel

from tokenmesh.services.gateway.extras.beam_search import BeamOptions
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard

_WITHOUT_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "stop": (None, "", []),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "structured_outputs": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
}
"""Fields that a search cannot honor, with the values that ask for nothing."""


def beam_options(
    body: SamplingFields, card: ModelCard, limits: GatewaySettings
) -> BeamOptions | None:
    """How to search; None when that is not asked for. Raises InvalidInput."""
    if not body.use_beam_search:
        if body.length_penalty != 1.0:
            raise InvalidInput(
                "length_penalty needs use_beam_search to be true", param="length_penalty"
            )
        return None
    if body.stream:
        raise InvalidInput("stream does not go with use_beam_search", param="stream")
    _check_others(body)
    width, widest = body.n or 1, min(limits.max_beam_width, card.vocab_size)
    if width > widest:
        raise InvalidInput(
            f"n is {width}, at most {widest} with use_beam_search: it is the width", param="n"
        )
    return BeamOptions(
        width=width,
        length_penalty=body.length_penalty,
        end_ids=frozenset() if body.ignore_eos else frozenset(card.eos_token_ids),
        stop_ids=frozenset(body.stop_token_ids or ()),
    )


def _check_others(body: SamplingFields) -> None:
    for name, neutral in _WITHOUT_EFFECT.items():
        value = getattr(body, name, None)
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_none=True)
        if value not in neutral:
            raise InvalidInput(f"{name} does not go with use_beam_search", param=name)
    # The answers' echo would need the prompt's log-probabilities, which a search does not ask for.
    if body.echo and getattr(body, "logprobs", None) is not None:
        raise InvalidInput("echo with logprobs does not go with use_beam_search", param="echo")
