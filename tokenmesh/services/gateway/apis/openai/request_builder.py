"""RequestBuilder: what chats, completions and token prompts share on the way to a request."""

from typing import Final

from tokenmesh.services.gateway.apis.openai.former_fields import refuse_former_fields
from tokenmesh.services.gateway.apis.openai.sampling import (
    beam_options,
    check_fields,
    read_budget,
    to_sampling,
)
from tokenmesh.services.gateway.apis.openai.sampling_checks import SamplingScope
from tokenmesh.services.gateway.apis.openai.sampling_fields import SamplingFields, StreamOptions
from tokenmesh.services.gateway.apis.openai.structured_limits import check_structured
from tokenmesh.services.gateway.core.context import RequestContext, check_request_id
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.generation.choice import TextOptions
from tokenmesh.services.gateway.core.generation.parsing import ModelText, Parsing
from tokenmesh.services.gateway.core.generation.request import ChunkOptions, Head, PromptJob
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.config.requests import AnswerSettings
from tokenmesh.shared.errors import InvalidInput, UnknownModel
from tokenmesh.shared.ids import RequestId, SeedSource
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.messages.tokenize import ChatPrompt, IdsPrompt, TextPrompt, Tokenize
from tokenmesh.shared.text import StopStrings

_SHORT_CHARS: Final = 2048
"""Longer constraints are checked in a thread."""


class RequestBuilder:
    """Finds the model, reads the sampling fields, makes the jobs."""

    def __init__(
        self,
        core: Core,
        catalog: Catalog | None = None,
        seeds: SeedSource | None = None,
    ) -> None:
        """None: the gateway's own."""
        self._resolve = core.adapters.resolve
        self.blobs = core.uploads.blobs
        self.uploads = core.uploads
        self.settings = core.settings
        self._catalog = catalog or core.mesh.catalog
        self._vocabularies = core.mesh.vocabularies
        self._seeds = seeds or core.generation.seeds

    async def begin(
        self, body: SamplingFields, context: RequestContext, max_tokens: int | None
    ) -> tuple[ModelCard, ModelText]:
        """The model and its text. Raises InvalidInput for what is wrong without the model."""
        card = await self.find_model(body, context, max_tokens)
        return card, await self._vocabularies.get(card.name)

    async def find_model(
        self, body: SamplingFields, context: RequestContext, max_tokens: int | None
    ) -> ModelCard:
        """`begin` without the model's text."""
        if body.request_id is not None and not context.is_own_id:
            check_request_id(body.request_id, "request_id")
            context.request_id = RequestId(body.request_id)
        if body.model_extra:
            refuse_former_fields(body.model_extra, type(body).model_fields)
            if body.unknown_fields:
                names = ", ".join(name[:64] for name in body.unknown_fields[:16])
                context.warnings.append(f"unknown fields ignored: {names}")
        if body.return_token_offsets:
            context.warnings.append("return_token_offsets ignored: only render routes have them")
        check_fields(body, max_tokens, self.settings)
        card = await self._find(body.model, context.request_id)
        context.model, context.asked_model = card.requested_name, body.model
        context.session_id = body.session_id
        if not card.generates:
            tasks = ", ".join(card.tasks) or "none"
            raise InvalidInput(
                f"the model {card.name!r} does not generate; its tasks: {tasks}", param="model"
            )
        return card

    async def _find(self, model: str | None, request_id: RequestId) -> ModelCard:
        try:
            return await self._catalog.find_soon(model, request_id)
        except UnknownModel:
            if model is None:
                raise
        await self._resolve(model)
        return self._catalog.find(model)

    def sampling(
        self,
        body: SamplingFields,
        text: ModelText,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        logprobs_field: str = "logprobs",
    ) -> SamplingParams:
        """With the model's defaults filled in. Raises InvalidInput.

        `logprobs_field` is where the client has set their number.
        """
        return to_sampling(
            body,
            text.defaults,
            SamplingScope(text.described.vocab_size, self.settings, logprobs is not None),
            seed=self.draw_seed(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logprobs_field=logprobs_field,
        )

    async def check(self, structured: Structured | None) -> None:
        """Raises InvalidInput for a constraint that is over the limits."""
        if structured is not None:
            calls = () if structured.calls is None else structured.calls.forms
            num_chars = sum(len(form.schema or "") for form in calls) + len(structured.text)
            is_long = num_chars > _SHORT_CHARS
            await off_loop(is_long, check_structured, structured, self.settings)

    async def encode(
        self,
        field: str,
        text: str,
        card: ModelCard,
        context: RequestContext,
        most: int | None = None,
    ) -> list[int]:
        """The ids of a text in the client's `field`, as a tokenizer encodes it.

        `most`: only so many, at its end. Raises InvalidInput, and what calls of tokenizers raise.
        """
        message = Tokenize(
            request_id=context.request_id,
            model=card.name,
            prompt=TextPrompt(text=text, add_special_tokens=False),
            truncate_prompt_tokens=most,
            max_tokens=card.max_model_len,
            tenant=context.access.tenant.name,
        )
        return await self._vocabularies.encode(field, message)

    def draw_seed(self) -> int:
        """For a request without one."""
        return self._seeds.draw()

    def job(
        self,
        body: SamplingFields,
        card: ModelCard,
        prompt: TextPrompt | IdsPrompt | ChatPrompt,
        sampling: SamplingParams,
        max_tokens: int | None,
        context: RequestContext,
        first_choice: int = 0,
        parsing: Parsing | None = None,
    ) -> PromptJob:
        """One prompt, ready for the pipeline. Raises InvalidInput."""
        return PromptJob(
            request_id=context.request_id,
            card=card,
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            n=body.n or 1,
            first_choice=first_choice,
            bad_words=tuple(body.bad_words or ()),
            truncate_prompt_tokens=_max_prompt_tokens(body, card, max_tokens),
            truncation_side=body.truncation_side or "left",
            cache_salt=self._cache_salt(body, context),
            priority=body.priority,
            tenant=context.access.tenant,
            parsing=parsing,
            budget=None if parsing is None else read_budget(body.thinking_token_budget, parsing),
            beams=beam_options(body, card),
            deadline_s=now_s() + self.settings.request_timeout_s,
            on_prepared=context.hand_on,
        )

    def _cache_salt(self, body: SamplingFields, context: RequestContext) -> str | None:
        if not self.settings.separate_prefix_caches:
            return body.cache_salt
        return f"{context.access.tenant.name}:{body.cache_salt or ''}"


def _max_prompt_tokens(body: SamplingFields, card: ModelCard, max_tokens: int | None) -> int | None:
    """-1 leaves room for the answer, which has at least one token."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    return max(1, card.max_model_len - (max_tokens or 1))


def head_of(body: SamplingFields, context: RequestContext, card: ModelCard) -> Head:
    """The response's identity; there is one service tier."""
    tier = "default" if body.service_tier is not None else None
    return Head(context.request_id, int(wall_s()), card.requested_name, tier)


def text_options(
    body: SamplingFields, *, drops_output: bool = False, shows_special: bool = False
) -> TextOptions:
    """Return how the text is made.

    `shows_special`: with special tokens in any case, for a parser.
    """
    return TextOptions(
        stops=StopStrings(body.stops) if body.stop else None,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens and not shows_special,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        min_tokens=body.min_tokens,
        stream_interval=body.stream_interval or 1,
        drops_output=drops_output,
    )


def chunk_options(body: SamplingFields, logprobs: bool, defaults: AnswerSettings) -> ChunkOptions:
    """Return what chunks contain besides text."""
    options = body.stream_options or StreamOptions()
    is_forced = defaults.force_include_usage
    return ChunkOptions(
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        usage=options.include_usage or is_forced,
        running_usage=(options.include_usage and options.continuous_usage_stats) or is_forced,
    )


def shows_tokens_as_ids(body: SamplingFields, defaults: AnswerSettings) -> bool:
    """Return whether log-probabilities show tokens as their ids."""
    given = body.return_tokens_as_token_ids
    return defaults.return_tokens_as_token_ids if given is None else given
