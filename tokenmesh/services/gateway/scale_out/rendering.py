"""Rendering: the body for /inference/v1/generate that gives the same tokens as a base route."""

from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmesh.services.gateway.generation.request import GenerationRequest, Prompt, PromptJob
from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.openai.request import ChatRequest, template_kwargs
from tokenmesh.services.gateway.openai.sampling_fields import SAMPLED, SamplingFields
from tokenmesh.services.gateway.scale_out.shapes import (
    RenderedFacts,
    RenderedRequest,
    RenderedSampling,
)
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.tokens import unpack_ids


@dataclass(frozen=True, slots=True)
class Rendering:
    """Makes the bodies for generate from one request."""

    body: SamplingFields
    """The chat or completion; for other APIs the chat that the request was translated to."""
    generation: GenerationRequest
    transfer: dict[str, Any] | None
    """kv_transfer_params, passed through."""

    def request(self, job: PromptJob, prompt: Prompt) -> RenderedRequest:
        """The body for one prompt. Raises NotSupported for a prompt with media."""
        if prompt.media:
            raise NotSupported("media are not supported by the render endpoint", param="messages")
        body, sampling = self.body, job.sampling_after(prompt.packed_ids)
        structured, options = sampling.structured, body.stream_options
        return RenderedRequest(
            request_id=job.request_id,
            token_ids=unpack_ids(prompt.packed_ids),
            sampling_params=self._sampling(sampling, job, prompt),
            model=body.model or job.card.name,
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(),
            cache_salt=body.cache_salt,
            priority=body.priority,
            reasoning_ended=None if structured is None else not structured.after,
            reasoning_parser_kwargs=self._parser_kwargs(),
            kv_transfer_params=self.transfer,
            rendered=_facts(sampling, prompt),
        )

    def _sampling(
        self, sampling: SamplingParams, job: PromptJob, prompt: Prompt
    ) -> RenderedSampling:
        body, options = self.body, self.generation.options
        detection = body.repetition_detection
        values = {
            name: getattr(sampling, field.wire_name or name) for name, field in SAMPLED.items()
        }
        bias = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
        values |= {
            "logit_bias": bias or None,
            "logprob_token_ids": sampling.logprob_token_ids or None,
            "repetition_detection": None if detection is None else detection.model_dump(),
        }
        return RenderedSampling(
            n=job.n,
            **values,
            # Without a seed from the client generate draws one, a different one for each response.
            seed=body.seed,
            stop=body.stops,
            include_stop_str_in_output=options.include_stop,
            max_tokens=prompt.max_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            bad_words=list(job.bad_words) or None,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            stream_interval=body.stream_interval,
            structured_outputs=None
            if sampling.structured is None
            else _outputs(sampling.structured),
            thinking_token_budget=body.thinking_token_budget,
        )

    def _parser_kwargs(self) -> dict[str, Any] | None:
        if self.generation.text.family.reasoning is None or not isinstance(self.body, ChatRequest):
            return None
        return {"chat_template_kwargs": template_kwargs(self.body) or {}}


def refuse_not_rendered(body: SamplingFields) -> None:
    """Raise NotSupported for what token ids and sampling parameters cannot express."""
    if body.use_beam_search:
        raise NotSupported(
            "Beam search is not supported by the render endpoint", param="use_beam_search"
        )
    if getattr(body, "prompt_embeds", None):
        raise NotSupported(
            "prompt_embeds is not supported by the render endpoint", param="prompt_embeds"
        )


def _facts(sampling: SamplingParams, prompt: Prompt) -> RenderedFacts:
    structured, thinking = sampling.structured, sampling.thinking
    return RenderedFacts(
        bad_words_token_ids=[list(ids) for ids in prompt.bad_words_ids] or None,
        reasoning_end_token_ids=None if structured is None else structured.after,
        thinking=None if thinking is None else msgspec.structs.asdict(thinking),
    )


def _outputs(structured: Structured) -> dict[str, Any]:
    """The constraint as the field structured_outputs."""
    value: Any = structured.text
    if structured.kind == "json_object":
        value = True
    elif structured.kind == "choice":
        value = msgspec.json.decode(structured.text)
    outputs: dict[str, Any] = {structured.kind: value}
    if not structured.any_whitespace:
        outputs["disable_any_whitespace"] = True
    if structured.whitespace_pattern is not None:
        outputs["whitespace_pattern"] = structured.whitespace_pattern
    if not structured.additional_properties:
        outputs["disable_additional_properties"] = True
    return outputs
