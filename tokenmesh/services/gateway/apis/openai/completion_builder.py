"""A completion's body becomes a GenerationRequest."""

from collections.abc import AsyncIterator
from dataclasses import replace

from tokenmesh.services.gateway.apis.openai.embeds_prompts import read_embeds
from tokenmesh.services.gateway.apis.openai.request import DEFAULT_MAX_TOKENS, CompletionRequest
from tokenmesh.services.gateway.apis.openai.request_builder import (
    RequestBuilder,
    chunk_options,
    head_of,
    shows_tokens_as_ids,
    text_options,
)
from tokenmesh.services.gateway.apis.openai.sampling import read_budget
from tokenmesh.services.gateway.apis.openai.suffix import Suffix, read_suffix
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.parsing import ModelText, Parsing
from tokenmesh.services.gateway.core.generation.request import (
    EMPTY_PROMPT,
    GenerationRequest,
    PromptJob,
)
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.http.id_lists import check_vocabulary
from tokenmesh.shared.errors import InvalidInput, PromptTooLong
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt, TextPrompt
from tokenmesh.shared.tokens import pack_ids


async def build_completion(
    builder: RequestBuilder, body: CompletionRequest, context: RequestContext
) -> GenerationRequest:
    """Raises InvalidInput and other errors of the request."""
    max_tokens, settings = body.max_tokens, builder.settings
    if max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "0 needs echo to be true")
    if body.suffix and body.echo:
        raise invalid("suffix", "cannot be combined with echo")
    card, text = await builder.begin(body, context, max_tokens)
    sampling = builder.sampling(
        body,
        text,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
    )
    await builder.check(sampling.structured)
    embeds = await read_embeds(body, card, builder.blobs, settings)
    _check_number(body, len(embeds), settings.max_choices)
    jobs = await _jobs(builder, body, card, sampling, context, text, embeds)
    return GenerationRequest(
        head=head_of(body, context, card),
        jobs=tuple(jobs),
        text=text,
        options=text_options(body, drops_output=max_tokens == 0),
        chunks=chunk_options(body, body.logprobs is not None, settings),
        is_stream=bool(body.stream),
        shows_tokens_as_ids=shows_tokens_as_ids(body, settings),
        echoes_prompt=body.echo,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
    )


async def _jobs(
    builder: RequestBuilder,
    body: CompletionRequest,
    card: ModelCard,
    sampling: SamplingParams,
    context: RequestContext,
    text: ModelText,
    embeds: list[IdsPrompt],
) -> list[PromptJob]:
    """One for each prompt; tensors come first, as in vLLM."""
    # The client wrote the prompt: it may end anywhere, also in the middle of reasoning.
    parsing = Parsing(family=text.family, vocabulary=text.vocabulary, continues=True)
    budget = read_budget(body.thinking_token_budget, parsing)
    # With max_tokens 0 only the prompt is wanted, but a worker always makes one token.
    max_tokens = max(1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    is_cut = body.truncate_prompt_tokens is not None
    max_ids = None if is_cut else card.max_model_len
    suffix = await read_suffix(builder, body, card, context, text)
    prompts = [
        *embeds,
        *[each async for each in _text_prompts(body, text, suffix, max_ids)],
    ]
    jobs = []
    for index, prompt in enumerate(prompts):
        first_choice = index * (body.n or 1)
        job = builder.job(body, card, prompt, sampling, max_tokens, context, first_choice)
        if len(prompts) > 1:
            job = replace(job, request_id=RequestId(f"{context.request_id}-{index}"))
        if index >= len(embeds) and len(body.prompts) > 1:
            job = replace(job, path=("prompt", index - len(embeds)))
        jobs.append(replace(job, budget=budget))
    return jobs


def _check_number(body: CompletionRequest, num_embeds: int, limit: int) -> None:
    count, n = len(body.prompts) + num_embeds, body.n or 1
    is_empty = body.prompt == "" and body.prompt_embeds is not None and not num_embeds
    if count == 0 or is_empty:
        raise InvalidInput(EMPTY_PROMPT, param="prompt")
    if count * n > limit:
        raise InvalidInput(
            f"{count} prompts times n = {n} are over the limit of {limit} choices "
            "(gateway.max_choices)",
            param="prompt",
        )


async def _text_prompts(
    body: CompletionRequest, text: ModelText, suffix: Suffix | None, max_ids: int | None
) -> AsyncIterator[TextPrompt | IdsPrompt]:
    """Raises PromptTooLong for a prompt of `max_ids` token ids or more, and InvalidInput."""
    turns = Turns()
    for prompt in body.prompts:
        await turns.rest()
        if isinstance(prompt, str):
            whole = prompt if suffix is None else suffix.around(prompt)
            yield TextPrompt(text=whole, add_special_tokens=body.add_special_tokens)
        else:
            yield _ids_prompt(prompt, suffix, max_ids, text.described.vocab_size)


def _ids_prompt(
    prompt: list[int], suffix: Suffix | None, max_ids: int | None, vocab_size: int
) -> IdsPrompt:
    num_ids = len(prompt) + (0 if suffix is None else suffix.num_ids)
    if max_ids is not None and num_ids >= max_ids:
        raise PromptTooLong.over(
            max_ids,
            f"your prompt resulted in {num_ids} tokens, which leaves no room for an answer",
            "the length of the prompt",
            param="prompt",
        )
    if not num_ids:
        raise invalid("prompt", "is an empty list of token ids")
    check_vocabulary("prompt", prompt, vocab_size)
    return IdsPrompt(token_ids=pack_ids(prompt) if suffix is None else suffix.around_ids(prompt))
