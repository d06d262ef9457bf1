"""A sampling field is declared once: what follows from the declaration."""

import msgspec
import pytest

from tokenmesh.services.gateway.apis.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.apis.openai.sampling import to_sampling
from tokenmesh.services.gateway.apis.openai.sampling_checks import SamplingScope
from tokenmesh.services.gateway.apis.openai.sampling_fields import (
    SAMPLED,
    NotServed,
    SamplingFields,
    marked,
)
from tokenmesh.services.gateway.apis.scale_out.generate_request import GenerateSampling
from tokenmesh.services.gateway.apis.scale_out.shapes import RenderedSampling
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.messages.sampling import SamplingParams

SCOPE = SamplingScope(vocab_size=100, settings=GatewaySettings(), has_logprobs=True)


def sampling(defaults: dict[str, object] | None = None, **fields: object) -> SamplingParams:
    body = SamplingFields.model_validate(fields)
    return to_sampling(
        body,
        defaults or {},
        SCOPE,
        seed=7,
        logprobs=0,
        prompt_logprobs=None,
        logprobs_field="logprobs",
    )


def test_every_sampled_field_is_one_of_sampling_params() -> None:
    wire = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert {field.wire_name or name for name, field in SAMPLED.items()} <= wire


def test_every_sampled_field_is_rendered_and_generate_accepts_it() -> None:
    rendered = {field.name for field in msgspec.structs.fields(RenderedSampling)}
    assert SAMPLED.keys() <= rendered
    assert rendered <= GenerateSampling.model_fields.keys()


def test_absent_fields_have_the_defaults_of_the_model_then_of_the_message() -> None:
    neutral = SamplingParams(seed=7, max_tokens=1, logprobs=0)
    assert sampling() == neutral
    defaults: dict[str, object] = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}
    assert sampling(defaults) == msgspec.structs.replace(neutral, temperature=0.6, top_k=20)
    assert sampling(defaults, temperature=0.0, top_k=-1) == msgspec.structs.replace(
        neutral, temperature=0.0
    )


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, GenerateSampling])
def test_defaults_of_fields_that_are_not_served_are_allowed(model: type[SamplingFields]) -> None:
    for name, field in marked(model, NotServed).items():
        assert field.allows(model.model_fields[name].default), name


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_field_that_is_served_has_a_meaning(model: type[SamplingFields]) -> None:
    refused = marked(model, NotServed)
    for name, field in model.model_fields.items():
        assert name in refused or field.description, name
