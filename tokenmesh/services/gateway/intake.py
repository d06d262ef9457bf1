"""Intake: a validated body becomes an Ask. The only place that reads OpenAI's request fields."""

from collections.abc import Sequence

import msgspec

from tokenmesh.services.gateway.ask import Ask
from tokenmesh.services.gateway.catalog import Catalog
from tokenmesh.services.gateway.choice import TextOptions
from tokenmesh.services.gateway.exchange import Exchange
from tokenmesh.services.gateway.inline_media import move_inline_media
from tokenmesh.services.gateway.job import Job
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.chat_stream import ChunkOptions
from tokenmesh.services.gateway.openai.completion_request import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
)
from tokenmesh.services.gateway.openai.head import Head
from tokenmesh.services.gateway.openai.not_supported import refuse_not_supported
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields, StreamOptions
from tokenmesh.services.gateway.openai.to_sampling import check_limits, to_sampling
from tokenmesh.services.gateway.vocabularies import ModelText, Vocabularies
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.ids import RequestId, SeedSource
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import ChatPrompt, IdsPrompt, TextPrompt
from tokenmesh.shared.text import StopStrings
from tokenmesh.shared.tokens import pack_ids


class Intake:
    """Knows the models and the limits."""

    def __init__(
        self,
        catalog: Catalog,
        vocabularies: Vocabularies,
        blobs: Blobs,
        settings: GatewaySettings,
    ) -> None:
        self._catalog = catalog
        self._vocabularies = vocabularies
        self._blobs = blobs
        self._settings = settings
        self._seeds = SeedSource(settings.seed)

    async def chat(self, body: ChatRequest, exchange: Exchange) -> Ask:
        """Raises InvalidInput and its kin."""
        asked = body.max_completion_tokens
        max_tokens = body.max_tokens if asked is None else asked
        card, text = await self._begin(body, exchange, max_tokens)
        if body.top_logprobs and not body.logprobs:
            raise InvalidInput("top_logprobs needs logprobs to be true", param="top_logprobs")
        sampling = self._sampling(
            body,
            text,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        prompt = await self.chat_prompt(body)
        job = self._job(body, card, prompt, sampling, max_tokens, exchange.request_id)
        last = body.messages[-1]
        role = "assistant" if body.add_generation_prompt else last["role"]
        content = last.get("content")
        is_continued = body.echo and last["role"] == role and isinstance(content, str)
        return Ask(
            head=Head(exchange.request_id, int(now_s()), card.name),
            jobs=(job,),
            text=text,
            options=_text_options(body),
            chunks=_chunk_options(body, bool(body.logprobs)),
            is_stream=bool(body.stream),
            shows_tokens_as_ids=bool(body.return_tokens_as_token_ids),
            role=role,
            echo=str(content) if is_continued else "",
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )

    async def chat_prompt(self, body: ChatRequest) -> ChatPrompt:
        """The conversation as the tokenizer takes it, large media moved out of it."""
        await move_inline_media(body.messages, self._blobs, self._settings)
        # tool_choice none: the model is not to know of the tools at all.
        tools = None if body.tool_choice == "none" else body.tools
        return ChatPrompt(
            messages_json=msgspec.json.encode(body.messages),
            tools_json=_json_or_none(tools),
            documents_json=_json_or_none(body.documents),
            template_kwargs_json=_json_or_none(body.chat_template_kwargs),
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
        )

    async def completion(self, body: CompletionRequest, exchange: Exchange) -> Ask:
        """Raises InvalidInput and its kin."""
        max_tokens = body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise InvalidInput("max_tokens 0 needs echo to be true", param="max_tokens")
        card, text = await self._begin(body, exchange, max_tokens)
        sampling = self._sampling(
            body,
            text,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
        )
        jobs = self._jobs(body, card, sampling, exchange.request_id, text)
        return Ask(
            head=Head(exchange.request_id, int(now_s()), card.name),
            jobs=tuple(jobs),
            text=text,
            options=_text_options(body, drops_output=max_tokens == 0),
            chunks=_chunk_options(body, body.logprobs is not None),
            is_stream=bool(body.stream),
            shows_tokens_as_ids=bool(body.return_tokens_as_token_ids),
            echoes_prompt=body.echo,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )

    async def _begin(
        self, body: SamplingFields, exchange: Exchange, max_tokens: int | None
    ) -> tuple[ModelCard, ModelText]:
        """Whatever can be refused without asking anybody, and the model."""
        if body.request_id is not None and not exchange.is_own_id:
            exchange.request_id = RequestId(body.request_id)
        if len(exchange.request_id) > self._settings.max_request_id_chars:
            limit = self._settings.max_request_id_chars
            raise InvalidInput(f"request_id is longer than {limit}", param="request_id")
        if body.unknown_fields:
            names = ", ".join(name[:64] for name in body.unknown_fields[:16])
            exchange.warnings.append(f"unknown fields ignored: {names}")
        refuse_not_supported(body)
        check_limits(body, max_tokens, self._settings)
        card = self._catalog.find(body.model)
        exchange.model = card.name
        return card, await self._vocabularies.get(card.name)

    def _sampling(
        self,
        body: SamplingFields,
        text: ModelText,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        return to_sampling(
            body,
            text.defaults,
            text.described.vocab_size,
            self._settings,
            seed=self._seeds.draw(),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _jobs(
        self,
        body: CompletionRequest,
        card: ModelCard,
        sampling: SamplingParams,
        request_id: RequestId,
        text: ModelText,
    ) -> list[Job]:
        prompts, n = body.prompts, body.n or 1
        limit = self._settings.max_choices
        if not prompts:
            raise InvalidInput("prompt is empty", param="prompt")
        if len(prompts) * n > limit:
            raise InvalidInput(
                f"{len(prompts)} prompts times n = {n} are over the limit of {limit} choices",
                param="prompt",
            )
        jobs = []
        for index, prompt in enumerate(prompts):
            one_id = request_id if len(prompts) == 1 else RequestId(f"{request_id}-{index}")
            built = _plain_prompt(prompt, body.add_special_tokens, text.described.vocab_size)
            # max_tokens 0 asks for the prompt alone: the worker has to make one token anyway.
            wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            max_tokens = max(1, wanted)
            jobs.append(self._job(body, card, built, sampling, max_tokens, one_id, index * n))
        return jobs

    def _job(
        self,
        body: SamplingFields,
        card: ModelCard,
        prompt: TextPrompt | IdsPrompt | ChatPrompt,
        sampling: SamplingParams,
        max_tokens: int | None,
        request_id: RequestId,
        first_choice: int = 0,
    ) -> Job:
        return Job(
            request_id=request_id,
            card=card,
            prompt=prompt,
            sampling=sampling,
            max_tokens=max_tokens,
            n=body.n or 1,
            first_choice=first_choice,
            bad_words=tuple(body.bad_words or ()),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
            cache_salt=body.cache_salt,
            priority=body.priority,
            deadline_s=now_s() + self._settings.request_timeout_s,
        )


def _text_options(body: SamplingFields, *, drops_output: bool = False) -> TextOptions:
    return TextOptions(
        stops=StopStrings(body.stops) if body.stops else None,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        min_tokens=body.min_tokens,
        stream_interval=body.stream_interval or 1,
        drops_output=drops_output,
    )


def _chunk_options(body: SamplingFields, logprobs: bool) -> ChunkOptions:
    told = body.stream_options or StreamOptions()
    return ChunkOptions(
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        usage=told.include_usage,
        running_usage=told.include_usage and told.continuous_usage_stats,
    )


def _plain_prompt(
    prompt: str | list[int], add_special_tokens: bool, vocab_size: int
) -> TextPrompt | IdsPrompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt, add_special_tokens=add_special_tokens)
    if not prompt:
        raise InvalidInput("prompt is an empty list of token ids", param="prompt")
    if max(prompt) >= vocab_size:
        raise InvalidInput(
            f"prompt: {max(prompt)} is no token id of the model (0 to {vocab_size - 1})",
            param="prompt",
        )
    return IdsPrompt(token_ids=pack_ids(prompt))


def _json_or_none(value: Sequence[object] | dict[str, object] | None) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)
