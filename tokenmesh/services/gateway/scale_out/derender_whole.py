"""Derendering of whole responses, and checks of what a derender request contains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.delivery import Delivery, Inbox
from tokenmesh.services.gateway.generation.request import GenerationRequest, Head, Prompt
from tokenmesh.services.gateway.openai.sampling_checks import check_vocabulary
from tokenmesh.services.gateway.scale_out.derender_request import TokensChoice, TokensResponse
from tokenmesh.services.gateway.scale_out.output_reader import OutputReader
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.telemetry import REQUEST_ID, Tally
from tokenmesh.shared.tokens import pack_ids


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """The response to one prompt."""

    response: TokensResponse
    prompt_ids: list[int]
    """Empty: unknown."""
    prompt_tokens: int | None

    @property
    def prompt(self) -> Prompt:
        """The prompt as the pipeline would make it."""
        usage, count = self.response.usage, self.prompt_tokens
        if count is None:
            count = usage.prompt_tokens if usage is not None else 0
        return prompt_of(self.prompt_ids, count)


def read_whole(
    request: GenerationRequest, parts: Sequence[PromptResponse], *, is_request_known: bool
) -> tuple[GenerationRequest, Delivery, list[OutputChunk]]:
    """The request to show, and what its writer needs. May take long. Raises InvalidInput."""
    reader = reader_of(request, is_request_known=is_request_known)
    has_logprobs = _have_logprobs([each for part in parts for each in part.response.choices])
    request = replace(
        request, chunks=replace(request.chunks, logprobs=request.chunks.logprobs and has_logprobs)
    )
    detokenizing = Tally("detokenize")
    delivery = delivery_of(request, [part.prompt for part in parts], detokenizing)
    chunks: list[OutputChunk] = []
    for index, part in enumerate(parts):
        n, response = request.jobs[index].n, part.response
        first = delivery.choices[index * n]
        if response.prompt_logprobs is not None:
            first.prompt_logprobs = reader.prompt_logprobs(
                response.prompt_logprobs, part.prompt_ids
            )
        first.cached_tokens = None if response.usage is None else response.usage.cached_tokens
        for choice in response.choices:
            for output in reader.outputs(choice, is_whole=True):
                chunks += delivery.push([(index * n + choice.index, output)])
        check_echo(request, part.prompt_ids, has_prompt_logprobs=first.prompt_logprobs is not None)
    detokenizing.record({REQUEST_ID: request.jobs[0].request_id})
    return request, delivery, chunks


def check_parts(parts: Sequence[PromptResponse], card: ModelCard) -> None:
    """Check what the body's types do not bound. Raises InvalidInput."""
    for part in parts:
        check_ids("prompt_token_ids", part.prompt_ids, card)
        choices = part.response.choices
        if sorted(each.index for each in choices) != list(range(len(choices))) or not choices:
            raise InvalidInput(
                f"choices must have the indexes 0 to n - 1, each once; there are {len(choices)}",
                param="choices",
            )
        for choice in choices:
            check_ids(f"token_ids of choice {choice.index}", choice.token_ids or [], card)
            if not choice.token_ids and choice.finish_reason != "abort":
                raise InvalidInput(
                    f"choice {choice.index} has empty or null token_ids", param="token_ids"
                )


def check_ids(name: str, ids: Sequence[int], card: ModelCard) -> None:
    """Raise InvalidInput for ids that the model does not have, and for too many."""
    param = name.partition(" ")[0]
    if len(ids) > card.max_model_len:
        raise InvalidInput(
            f"{name}: length ({len(ids)}) exceeds max_model_len ({card.max_model_len})",
            param=param,
        )
    check_vocabulary(name, ids, card.vocab_size, param)


def check_echo(
    request: GenerationRequest, prompt_ids: Sequence[int], *, has_prompt_logprobs: bool
) -> None:
    """An echo needs the prompt. Raises InvalidInput."""
    if not request.echoes_prompt:
        return
    if not prompt_ids:
        raise InvalidInput("echo needs prompt_token_ids", param="prompt_token_ids")
    if request.chunks.logprobs and not has_prompt_logprobs:
        raise InvalidInput(
            "echo with logprobs needs the prompt_logprobs that generate answered",
            param="prompt_logprobs",
        )


def reader_of(request: GenerationRequest, *, is_request_known: bool) -> OutputReader:
    """For the choices of a request."""
    job = request.jobs[0]
    ends = frozenset(job.card.eos_token_ids) | frozenset(request.text.described.special_ids)
    return OutputReader(job.sampling if is_request_known else None, ends)


def delivery_of(
    request: GenerationRequest, prompts: Sequence[Prompt], detokenizing: Tally
) -> Delivery:
    """A Delivery whose output does not come from streams."""
    pairs = zip(request.jobs, prompts, strict=True)
    choices = [choice for pair in pairs for choice in request.make_choices(*pair)]
    inbox = Inbox(0)
    for choice in choices:
        inbox.connect(choice.index, _nothing_to_close)
    return Delivery(prompts, choices, inbox, detokenizing)


def prompt_of(ids: list[int], count: int) -> Prompt:
    """A prompt of which at least the number of tokens is known."""
    return Prompt(packed_ids=pack_ids(ids), num_tokens=count, max_tokens=0)


def with_head(
    request: GenerationRequest, request_id: str | None, created: int | None
) -> GenerationRequest:
    """The request with the identity of generate's response."""
    head = request.head
    known = Head(request_id or head.id, created or head.created, head.model, head.service_tier)
    return replace(request, head=known)


def _have_logprobs(choices: Sequence[TokensChoice]) -> bool:
    """Raises InvalidInput if only some have them."""
    has = [
        each.logprobs is not None and each.logprobs.content is not None
        for each in choices
        if each.token_ids
    ]
    if any(has) and not all(has):
        raise InvalidInput("logprobs of some choices are missing", param="logprobs")
    return any(has)


def _nothing_to_close() -> None:
    """There is no stream to close."""
