"""CompletionIntake: the body of a plain completion becomes an Ask."""

from collections.abc import AsyncIterator
from dataclasses import replace

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.extras.prompt_embeds import EmbedsPrompt, read_embeds
from tokenmesh.services.gateway.extras.suffix import fill_in_prompt
from tokenmesh.services.gateway.generation.parsing import Parsing
from tokenmesh.services.gateway.generation.prompt_job import EMPTY_PROMPT, PromptJob
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.turns import Turns
from tokenmesh.services.gateway.mesh.vocabularies import ModelText
from tokenmesh.services.gateway.openai.completion_request import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
)
from tokenmesh.services.gateway.openai.request_builder import (
    RequestBuilder,
    chunk_options,
    head_of,
    shows_tokens_as_ids,
    text_options,
)
from tokenmesh.services.gateway.openai.rule_fields import out_of_vocabulary, read_budget
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt, TextPrompt
from tokenmesh.shared.tokens import pack_ids


class CompletionIntake:
    """The only place that reads the fields of a plain completion."""

    def __init__(self, desk: RequestBuilder) -> None:
        self._desk = desk

    async def ask(self, body: CompletionRequest, exchange: RequestContext) -> GenerationRequest:
        """Raises InvalidInput and its kin."""
        max_tokens = body.max_tokens
        if max_tokens == 0 and not body.echo:
            raise InvalidInput("max_tokens 0 needs echo to be true", param="max_tokens")
        if body.suffix and body.echo:
            raise InvalidInput("suffix does not go with echo", param="suffix")
        card, text = await self._desk.begin(body, exchange, max_tokens)
        sampling = self._desk.sampling(
            body,
            text,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
        )
        await self._desk.check(sampling.structured)
        embeds = await read_embeds(body, card, self._desk.blobs, self._desk.settings)
        jobs = await self._jobs(body, card, sampling, exchange, text, embeds)
        return GenerationRequest(
            head=head_of(body, exchange, card),
            jobs=tuple(jobs),
            text=text,
            options=text_options(body, drops_output=max_tokens == 0),
            chunks=chunk_options(body, body.logprobs is not None, self._desk.settings),
            is_stream=bool(body.stream),
            shows_tokens_as_ids=shows_tokens_as_ids(body, self._desk.settings),
            echoes_prompt=body.echo,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )

    async def _jobs(
        self,
        body: CompletionRequest,
        card: ModelCard,
        sampling: SamplingParams,
        exchange: RequestContext,
        text: ModelText,
        embeds: list[EmbedsPrompt],
    ) -> list[PromptJob]:
        """Tensors first, as in vLLM."""
        self._check_number(body, len(embeds))
        # The client has written the prompt: it may end anywhere, also in the midst of reasoning.
        parsing = Parsing(family=text.family, vocabulary=text.vocabulary, continues=True)
        budget = read_budget(body.thinking_token_budget, parsing)
        # max_tokens 0 asks for the prompt alone: the worker has to make one token anyway.
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        is_cut = body.truncate_prompt_tokens is not None
        most = None if is_cut else card.max_model_len
        prompts = [
            *(each.placeholders for each in embeds),
            *[each async for each in _text_prompts(body, text, most)],
        ]
        jobs = []
        for index, prompt in enumerate(prompts):
            first_choice = index * (body.n or 1)
            job = self._desk.job(
                body, card, prompt, sampling, max(1, wanted), exchange, first_choice
            )
            if len(prompts) > 1:
                job = replace(job, request_id=RequestId(f"{exchange.request_id}-{index}"))
            if index < len(embeds):
                given = embeds[index]
                job = replace(job, embeds=given.item, cache_salt=given.salt(job.cache_salt))
            elif len(body.prompts) > 1:
                job = replace(job, where=f"prompt[{index - len(embeds)}]")
            jobs.append(replace(job, budget=budget))
        return jobs

    def _check_number(self, body: CompletionRequest, num_embeds: int) -> None:
        count, n, limit = (
            len(body.prompts) + num_embeds,
            body.n or 1,
            self._desk.settings.max_choices,
        )
        # What one kind of prompt leaves out the other has to bring.
        is_empty = body.prompt == "" and body.prompt_embeds is not None and not num_embeds
        if count == 0 or is_empty:
            raise InvalidInput(EMPTY_PROMPT, param="prompt")
        if count * n > limit:
            raise InvalidInput(
                f"{count} prompts times n = {n} are over the limit of {limit} choices",
                param="prompt",
            )


async def _text_prompts(
    body: CompletionRequest, text: ModelText, most: int | None
) -> AsyncIterator[TextPrompt | IdsPrompt]:
    """`most`: token ids of one. Raises PromptTooLong, InvalidInput."""
    turns = Turns()
    for prompt in body.prompts:
        await turns.rest()
        whole = fill_in_prompt(prompt, body.suffix, text.vocabulary) if body.suffix else prompt
        if most is not None and not isinstance(whole, str) and len(whole) >= most:
            raise PromptTooLong.over(
                most,
                f"your prompt resulted in {len(whole)} tokens, which leaves no room for an answer",
                "the length of the prompt",
                param="prompt",
            )
        yield _plain_prompt(whole, body.add_special_tokens, text.described.vocab_size)


def _plain_prompt(
    prompt: str | list[int], add_special_tokens: bool, vocab_size: int
) -> TextPrompt | IdsPrompt:
    if isinstance(prompt, str):
        return TextPrompt(text=prompt, add_special_tokens=add_special_tokens)
    if not prompt:
        raise InvalidInput("prompt is an empty list of token ids", param="prompt")
    if max(prompt) >= vocab_size:
        raise out_of_vocabulary("prompt", max(prompt), vocab_size)
    return IdsPrompt(token_ids=pack_ids(prompt))
