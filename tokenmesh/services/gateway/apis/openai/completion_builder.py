"""A completion's body becomes a GenerationRequest.

Its prompt may be a tensor (`prompt_embeds`), which is sent by reference like an encoder's output.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tokenmesh.services.gateway.apis.openai.prompt_embeds import store_tensor
from tokenmesh.services.gateway.apis.openai.request import DEFAULT_MAX_TOKENS, CompletionRequest
from tokenmesh.services.gateway.apis.openai.request_builder import (
    RequestBuilder,
    chunk_options,
    head_of,
    shows_tokens_as_ids,
    text_options,
)
from tokenmesh.services.gateway.apis.openai.sampling import read_budget
from tokenmesh.services.gateway.apis.openai.sampling_checks import check_vocabulary
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.parsing import ModelText, Parsing
from tokenmesh.services.gateway.core.generation.request import (
    EMPTY_PROMPT,
    GenerationRequest,
    PromptJob,
)
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import FieldPath, InvalidInput, PayloadTooLarge, PromptTooLong
from tokenmesh.shared.ids import RequestId
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt, TextPrompt
from tokenmesh.shared.text import Vocabulary
from tokenmesh.shared.tokens import count_ids, pack_ids

_NAME = "prompt_embeds"
_PLACEHOLDER = 0
"""The token id in place of each embedding; it is not read."""


async def read_embeds(
    body: CompletionRequest, card: ModelCard, blobs: Blobs, limits: GatewaySettings
) -> list[IdsPrompt]:
    """The tensors of the body, each a prompt with one token id a row. Raises InvalidInput."""
    given = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    if not given:
        return []
    _check_others(body)
    if len(given) > limits.max_choices:
        raise invalid(_NAME, f"holds more than {limits.max_choices} tensors (gateway.max_choices)")
    found = []
    for index, text in enumerate(given):
        path: FieldPath = (_NAME, index) if len(given) > 1 else (_NAME,)
        item = await store_tensor(text, card, blobs, limits, path)
        ids = pack_ids([_PLACEHOLDER] * item.length)
        found.append(IdsPrompt(token_ids=ids, media=[item]))
    return found


def _check_others(body: CompletionRequest) -> None:
    wanted = {
        "echo": body.echo,
        "suffix": body.suffix,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise invalid(name, f"cannot be combined with {_NAME}")


class SuffixMarkers(NamedTuple):
    """Markers before the prompt, before the suffix, and before the text to be generated."""

    prefix: str
    suffix: str
    middle: str


FORMATS: Final = (
    # Qwen coder, CodeGemma
    SuffixMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite code, StableCode
    SuffixMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # SantaCoder
    SuffixMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek coder
    SuffixMarkers(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    # Code Llama
    SuffixMarkers("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    # CodeGeeX, GLM-4
    SuffixMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


@dataclass(frozen=True, slots=True)
class Suffix:
    """What follows the text to be generated, in the format of one model."""

    text: str
    markers: SuffixMarkers
    marker_ids: tuple[int, int, int]
    end: bytes
    """Its ids and the last marker's, packed once for all prompts that are given as ids."""

    def around(self, prompt: str) -> str:
        """The prompt with markers and suffix."""
        markers = self.markers
        return f"{markers.prefix}{prompt}{markers.suffix}{self.text}{markers.middle}"

    def around_ids(self, prompt: list[int]) -> bytes:
        """The packed ids around a prompt of ids."""
        before, between, _ = self.marker_ids
        return pack_ids([before, *prompt, between]) + self.end

    @property
    def num_ids(self) -> int:
        """How many it adds to a prompt that is given as ids."""
        return 2 + count_ids(self.end)


def find_markers(vocabulary: Vocabulary) -> tuple[SuffixMarkers, tuple[int, int, int]]:
    """The model's markers and their ids. Raises InvalidInput for a model without them."""
    for markers in FORMATS:
        match [vocabulary.added_id(marker) for marker in markers]:
            case [int() as before, int() as between, int() as after]:
                return markers, (before, between, after)
    raise InvalidInput(
        "suffix: the model's vocabulary has no markers for filling in the middle",
        param="suffix",
    )


async def _read_suffix(
    builder: RequestBuilder,
    body: CompletionRequest,
    card: ModelCard,
    context: RequestContext,
    text: ModelText,
) -> Suffix | None:
    """A tokenizer encodes it, once for all prompts. Raises InvalidInput and as its calls do."""
    if not body.suffix:
        return None
    markers, marker_ids = find_markers(text.vocabulary)
    check_copies(body, len(body.suffix), str, builder.settings)
    ids: list[int] = []
    if not all(isinstance(prompt, str) for prompt in body.prompts):
        ids = await builder.encode("suffix", body.suffix, card, context)
        check_copies(body, len(ids), list, builder.settings)
    return Suffix(body.suffix, markers, marker_ids, pack_ids([*ids, marker_ids[2]]))


def check_copies(body: CompletionRequest, length: int, kind: type, limits: GatewaySettings) -> None:
    """Raises PayloadTooLarge where the suffix of that length, which each prompt of a kind holds a
    copy of, makes the prompts larger than a body may be."""
    name, what = ("max_body_bytes", "characters") if kind is str else ("max_json_ids", "token ids")
    total = sum(len(prompt) + length for prompt in body.prompts if isinstance(prompt, kind))
    if total > (most := getattr(limits, name)):
        raise PayloadTooLarge(
            f"with the suffix in each of them the prompts hold {total} {what}, at most {most} "
            f"(gateway.{name})",
            param="suffix",
        )


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
    suffix = await _read_suffix(builder, body, card, context, text)
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
