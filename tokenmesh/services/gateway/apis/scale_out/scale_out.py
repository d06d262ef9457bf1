"""ScaleOut: the parts of a gateway that is only a frontend or only an engine.

GenerateBuilder turns a GenerateRequest into a GenerationRequest, with or without a tokenizer.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from tokenmesh.services.gateway.apis.openai.request import thinking_switch
from tokenmesh.services.gateway.apis.openai.request_builder import (
    RequestBuilder,
    chunk_options,
    head_of,
    text_options,
)
from tokenmesh.services.gateway.apis.openai.sampling import read_budget
from tokenmesh.services.gateway.apis.scale_out.generate_request import (
    GenerateRequest,
    GenerateSampling,
    RenderedPrompt,
)
from tokenmesh.services.gateway.apis.scale_out.generate_response import Aborts
from tokenmesh.services.gateway.core.api import Background
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.generation.parsing import ModelText, Parsing
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Prompt
from tokenmesh.services.gateway.core.http.id_lists import check_vocabulary
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.mesh.vocabularies import Vocabularies
from tokenmesh.services.gateway.parsers.formats import FormatFamily
from tokenmesh.shared.config import Settings
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.hashing import chain_head, route_hashes, route_scope
from tokenmesh.shared.ids import SeedSource
from tokenmesh.shared.messages import Described, Tokenized
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.tokens import pack_ids


class GenerateBuilder:
    """Reads the fields of a GenerateRequest."""

    def __init__(
        self,
        builder: RequestBuilder,
        catalog: Catalog,
        vocabularies: Vocabularies,
        settings: Settings,
    ) -> None:
        self._builder = builder
        self._catalog = catalog
        self._vocabularies = vocabularies
        self._uses_tokenizers = not settings.gateway.tokens_only
        self._no_vocabulary = Vocabulary.empty()
        self._route_block_tokens = settings.tokenizer.route_block_tokens

    async def build(self, body: GenerateRequest, context: RequestContext) -> GenerationRequest:
        """Raises InvalidInput and other errors of the request."""
        body.refuse_not_served()
        fields = body.fields
        card = await self._builder.find_model(fields, context, fields.max_tokens)
        packed = _packed_prompt(body, card)
        has_tokenizer = self._uses_tokenizers and self._catalog.has_tokenizer(card.name)
        needs = tuple(_text_needs(body, fields))
        if needs and not has_tokenizer:
            raise _needs_tokenizer(needs[0])
        wants_text = has_tokenizer and (bool(needs) or _may_reason_first(body, fields))
        text = await self._text(card, wants_text)
        sampling = self._builder.sampling(
            fields,
            text,
            logprobs=fields.logprobs,
            prompt_logprobs=body.sampling_params.prompt_logprobs,
        )
        sampling = _with_rules(sampling, body, fields, text, packed)
        await self._builder.check(sampling.structured)
        rendered = body.rendered or RenderedPrompt()
        if rendered.bad_words_token_ids is not None:
            fields = fields.model_copy(update={"bad_words": None})
        job = self._builder.job(
            fields, card, IdsPrompt(token_ids=packed), sampling, fields.max_tokens, context
        )
        if not has_tokenizer:
            job = replace(job, tokenized=self._tokenized(packed, card, job.cache_salt))
        return GenerationRequest(
            head=head_of(fields, context, card),
            jobs=(job,),
            text=text,
            options=text_options(fields),
            chunks=chunk_options(fields, fields.logprobs is not None, self._builder.settings),
            is_stream=bool(fields.stream),
        )

    async def _text(self, card: ModelCard, wants_text: bool) -> ModelText:
        """Without the model's sampling defaults: `sampling_params` are complete, as in vLLM."""
        if wants_text:
            return replace(await self._vocabularies.get(card.name), defaults={})
        described = Described(
            fingerprint="", vocab_size=card.vocab_size, special_ids=[], has_chat_template=False
        )
        return ModelText(described, self._no_vocabulary, {}, FormatFamily())

    def _tokenized(self, packed: bytes, card: ModelCard, salt: str | None) -> Tokenized:
        """A tokenizer's answer. Such prompts share placement by prefix with each other only."""
        scope = route_scope(card.name, "", self._route_block_tokens)
        return Tokenized(
            token_ids=packed,
            route_hashes=route_hashes(packed, self._route_block_tokens, scope, salt=salt),
            route_head=chain_head(scope),
        )


def _packed_prompt(body: GenerateRequest, card: ModelCard) -> bytes:
    """Raises InvalidInput for ids that the model does not have, or too many."""
    ids = body.token_ids
    if len(ids) >= card.max_model_len:
        raise PromptTooLong.over(
            card.max_model_len,
            f"token_ids has {len(ids)} tokens, which leaves no room for an answer",
            "the length of token_ids",
            param="token_ids",
        )
    check_vocabulary("token_ids", ids, card.vocab_size)
    rendered = body.rendered or RenderedPrompt()
    check_vocabulary("rendered", [rendered.highest_id], card.vocab_size)
    return pack_ids(ids)


def _text_needs(body: GenerateRequest, fields: GenerateSampling) -> Iterator[str]:
    """Fields that cannot be served without the model's tokenizer."""
    rendered = body.rendered or RenderedPrompt()
    if body.output_mode == "text":
        if not fields.detokenize:
            raise InvalidInput(
                "output_mode='text' requires sampling_params.detokenize to be true",
                param="output_mode",
            )
        yield "output_mode"
    if fields.stops:
        if not fields.detokenize:
            raise InvalidInput(
                "sampling_params.stop is looked for in the text: set detokenize to true",
                param="sampling_params.stop",
            )
        yield "sampling_params.stop"
    if fields.bad_words and rendered.bad_words_token_ids is None:
        yield "sampling_params.bad_words"
    if fields.thinking_token_budget not in (None, -1) and rendered.thinking is None:
        yield "sampling_params.thinking_token_budget"


def _needs_tokenizer(name: str) -> InvalidInput:
    hints = {
        "output_mode": "output_mode='text' requires a tokenizer; use output_mode='tokens'",
        "sampling_params.stop": "stop strings are not supported without a tokenizer; check them "
        "where the answer is derendered, or use stop_token_ids",
        "sampling_params.bad_words": "bad_words requires a tokenizer; send the field `rendered` "
        "of the render route along",
        "sampling_params.thinking_token_budget": "thinking_token_budget requires a tokenizer; "
        "send the field `rendered` of the render route along",
    }
    return InvalidInput(f"{hints[name]}: this server has none for the model", param=name)


def _may_reason_first(body: GenerateRequest, fields: GenerateSampling) -> bool:
    """Return whether the model's parser is needed to find where a constraint begins."""
    rendered = body.rendered or RenderedPrompt()
    is_known = bool(body.reasoning_ended) or rendered.reasoning_end_token_ids is not None
    return fields.structured_outputs is not None and not is_known


def _with_rules(
    sampling: SamplingParams,
    body: GenerateRequest,
    fields: GenerateSampling,
    text: ModelText,
    packed: bytes,
) -> SamplingParams:
    """Add what depends on the prompt: where reasoning ends in it, and banned sequences."""
    rendered, structured = body.rendered or RenderedPrompt(), sampling.structured
    kwargs = body.reasoning_parser_kwargs
    parsing = Parsing(
        family=text.family,
        vocabulary=text.vocabulary,
        thinking=thinking_switch(kwargs.chat_template_kwargs if kwargs is not None else None),
    )
    if structured is not None:
        ends = rendered.reasoning_end_token_ids
        if ends is None:
            ends = [] if body.reasoning_ended else parsing.reasoning_ends(packed)
        structured = msgspec.structs.replace(structured, after=ends, calls=rendered.call_forms())
    thinking = None
    if rendered.thinking is not None:
        thinking = rendered.thinking.budget
    elif (budget := read_budget(fields.thinking_token_budget, parsing)) is not None:
        thinking = budget.rule(packed)
    return msgspec.structs.replace(
        sampling,
        structured=structured,
        thinking=thinking,
        bad_words_ids=rendered.bad_words_token_ids or [],
    )


class ScaleOut(Background):
    """Does nothing if the routes are disabled."""

    def __init__(self, core: Core) -> None:
        limits, mesh = core.settings, core.mesh
        self.is_enabled = limits.serves_scale_out
        self.catalog = mesh.rendered
        """Includes models that only a tokenizer serves: that is enough to render."""
        self.builder = RequestBuilder(core, mesh.rendered, SeedSource(limits.seed))
        builder = RequestBuilder(core, seeds=SeedSource(limits.seed))
        self.tokens = GenerateBuilder(builder, mesh.catalog, mesh.vocabularies, core.config)
        self.aborts = Aborts(core.bus, limits.max_abort_requests)
        self._pipeline = mesh.pipeline

    async def start(self) -> None:
        if self.is_enabled:
            await self.aborts.start()

    async def stop(self) -> None:
        await self.aborts.stop()

    async def tokenize(self, request: GenerationRequest) -> Sequence[Prompt]:
        """The prompts of all jobs. Raises the error of the first that fails."""
        tasks = [asyncio.create_task(self._pipeline.tokenize(job)) for job in request.jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
