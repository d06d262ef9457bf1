"""Rendering: a tokenized prompt of an Ask as the body for /inference/v1/generate."""

from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmesh.services.gateway.generation.prompt_job import Prompt, PromptJob
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields
from tokenmesh.services.gateway.openai.thinking import template_kwargs
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
    """Of one request."""

    body: SamplingFields
    """The chat or completion; of other APIs the chat that they were translated to."""
    ask: GenerationRequest
    transfer: dict[str, Any] | None
    """kv_transfer_params, handed through."""

    def request(self, job: PromptJob, prompt: Prompt) -> RenderedRequest:
        """Of one prompt. Raises NotSupported for a prompt with media."""
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
        body, options = self.body, self.ask.options
        detection = body.repetition_detection
        return RenderedSampling(
            n=job.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            # One that the client did not choose is drawn by generate: each answer is another.
            seed=body.seed,
            stop=body.stops,
            stop_token_ids=sampling.stop_token_ids,
            include_stop_str_in_output=options.include_stop,
            ignore_eos=sampling.ignore_eos,
            max_tokens=prompt.max_tokens,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            logprob_token_ids=sampling.logprob_token_ids or None,
            logit_bias={str(key): bias for key, bias in sampling.logit_bias.items()} or None,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=list(job.bad_words) or None,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            stream_interval=body.stream_interval,
            structured_outputs=None
            if sampling.structured is None
            else _outputs(sampling.structured),
            thinking_token_budget=body.thinking_token_budget,
            repetition_detection=None if detection is None else detection.model_dump(),
        )

    def _parser_kwargs(self) -> dict[str, Any] | None:
        if self.ask.text.family.reasoning is None or not isinstance(self.body, ChatRequest):
            return None
        return {"chat_template_kwargs": template_kwargs(self.body) or {}}


def refuse_not_rendered(body: SamplingFields) -> None:
    """Raise NotSupported for what needs more than token ids between two servers."""
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
    """The constraint in the words of structured_outputs."""
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
