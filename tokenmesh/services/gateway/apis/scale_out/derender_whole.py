"""Derendering of whole responses, and checks of what a derender request contains.

OutputReader gives generate's response as the workers' outputs, so that choices can read it again.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

from tokenmesh.services.gateway.apis.scale_out.derender_request import (
    LogprobCandidate,
    PromptCell,
    SampledLogprob,
    TokensChoice,
    TokensResponse,
)
from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery, Inbox
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Head, Prompt
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.id_lists import check_vocabulary
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.telemetry import REQUEST_ID, Tally
from tokenmesh.shared.tokens import pack_ids

PromptTable = dict[str, PromptCell] | None


class TokenWithLogprob(Protocol):
    """A token at one position and its log-probability, from the client."""

    token_id: int
    logprob: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class OutputReader:
    """Reads the choices of one request."""

    sampling: SamplingParams | None
    """These are the parameters of the generate request; None: unknown."""
    end_ids: Set[int]
    """Tokens that end an answer and are not part of its text."""
    needs_each: bool = True
    """It tells whether log-probabilities must be those of the tokens, one for each."""

    def outputs(self, choice: TokensChoice, *, is_whole: bool) -> Iterator[Output]:
        """In order. `is_whole`: the choice has ended even without a finish reason."""
        ids, finish = choice.token_ids or [], choice.finish_reason
        logprobs = self._logprobs(choice)
        stop = choice.stop_reason
        token, text = (None, stop) if isinstance(stop, str) else (stop, None)
        if finish == "stop" and self._ends_with_stop(ids, stop):
            yield Output(ids, logprobs, finish, token)
            return
        yield Output(ids, logprobs)
        if finish is not None or is_whole:
            # Apart from the last token, which is part of the text.
            yield Output(finish=finish or "stop", stop_token=token, stop_text=text)

    def prompt_logprobs(
        self, tables: Sequence[PromptTable], prompt_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Raises InvalidInput for tables that do not belong to the prompt."""
        if len(tables) != len(prompt_ids):
            raise invalid(
                "prompt_logprobs",
                f"length ({len(tables)}) must equal prompt_token_ids length ({len(prompt_ids)})",
            )
        pairs = zip(tables, prompt_ids, strict=True)
        return [None if table is None else self._entry(table, own) for table, own in pairs]

    def _entry(self, table: dict[str, PromptCell], own_id: int) -> TokenLogprobs:
        if str(own_id) not in table or not all(key.isascii() and key.isdigit() for key in table):
            raise InvalidInput(
                f"prompt_logprobs: no entry for the prompt's token {own_id}",
                param="prompt_logprobs",
            )
        candidates = {
            int(key): LogprobCandidate.model_construct(
                token_id=int(key), logprob=each.logprob, rank=each.rank
            )
            for key, each in table.items()
        }
        count = None if self.sampling is None else self.sampling.prompt_logprobs
        return read_logprobs(candidates[own_id], list(candidates.values()), count=count, named=())

    def _logprobs(self, choice: TokensChoice) -> list[TokenLogprobs] | None:
        content = None if choice.logprobs is None else choice.logprobs.content
        if content is None:
            return None
        if not self.are_of_tokens(choice):
            if not self.needs_each:
                return None
            raise InvalidInput(
                f"logprobs.content of choice {choice.index} does not match its token_ids",
                param="logprobs",
            )
        return self.shown(content)

    def are_of_tokens(self, choice: TokensChoice) -> bool:
        """Return whether the choice has a log-probability of each of its tokens."""
        content = None if choice.logprobs is None else choice.logprobs.content
        return [each.token_id for each in content or ()] == (choice.token_ids or [])

    def shown(self, content: Sequence[SampledLogprob]) -> list[TokenLogprobs]:
        """Log-probabilities as the response shows them."""
        count = None if self.sampling is None else self.sampling.logprobs
        named = () if self.sampling is None else self.sampling.logprob_token_ids
        return [
            read_logprobs(each, each.top_logprobs, count=count, named=named) for each in content
        ]

    def _ends_with_stop(self, ids: Sequence[int], stop: int | str | None) -> bool:
        """Return whether the last token ended the choice."""
        if not ids or isinstance(stop, str):
            return False
        return ids[-1] == stop if stop is not None else ids[-1] in self.end_ids


def replayed(token_ids: list[int], *, has_logprobs: bool) -> Output:
    """Tokens that the client has seen: only the number of their log-probabilities matters."""
    logprobs = [TokenLogprobs(each, 0.0, 1) for each in token_ids] if has_logprobs else None
    return Output(list(token_ids), logprobs)


def read_logprobs(
    own: TokenWithLogprob,
    tops: Sequence[TokenWithLogprob],
    *,
    count: int | None,
    named: Sequence[int],
) -> TokenLogprobs:
    """The worker's entry. `count` None: the request is unknown, so `tops` are used unchanged."""
    if named:
        by_id = {each.token_id: each.logprob for each in tops}
        pairs = [(token_id, by_id[token_id]) for token_id in named if token_id in by_id]
    elif count is None:
        pairs = [(each.token_id, each.logprob) for each in tops]
    else:
        pairs = _by_rank(own, tops, count)
    ids, logprobs = [each for each, _ in pairs], [each for _, each in pairs]
    return TokenLogprobs(own.token_id, own.logprob, own.rank or 0, ids, logprobs)


def _by_rank(
    own: TokenWithLogprob, tops: Sequence[TokenWithLogprob], count: int
) -> list[tuple[int, float]]:
    """The `count` most likely; the sampled token has the rank that no other candidate has."""
    slots: list[tuple[int, float] | None] = [None] * min(count, len(tops))
    for each in tops:
        if each.token_id != own.token_id and each.rank and each.rank <= len(slots):
            slots[each.rank - 1] = (each.token_id, each.logprob)
    if slots.count(None) == 1:
        slots[slots.index(None)] = (own.token_id, own.logprob)
    return [each for each in slots if each is not None]


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
    request: GenerationRequest,
    parts: Sequence[PromptResponse],
    *,
    is_request_known: bool,
    needs_each: bool = True,
) -> tuple[GenerationRequest, Delivery, list[OutputChunk]]:
    """The request to show, and what its writer needs. May take long. Raises InvalidInput.

    Log-probabilities are shown where the response has them. `needs_each`: see OutputReader.
    """
    reader = reader_of(request, is_request_known=is_request_known, needs_each=needs_each)
    has_logprobs = _have_logprobs([each for part in parts for each in part.response.choices])
    request = replace(request, chunks=replace(request.chunks, logprobs=has_logprobs))
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
            own: list[OutputChunk] = []
            for output in reader.outputs(choice, is_whole=True):
                own += delivery.push([(index * n + choice.index, output)])
            content = None if choice.logprobs is None else choice.logprobs.content
            if own and content is not None and not reader.are_of_tokens(choice):
                own[-1].logprobs = reader.shown(content)
            chunks += own
        check_echo(request, part.prompt_ids, has_prompt_logprobs=first.prompt_logprobs is not None)
    detokenizing.record({REQUEST_ID: request.jobs[0].request_id})
    return request, delivery, chunks


def check_parts(parts: Sequence[PromptResponse], card: ModelCard) -> None:
    """Check what the body's types do not bound. Raises InvalidInput."""
    for part in parts:
        check_ids("prompt_token_ids", part.prompt_ids, card)
        choices = part.response.choices
        if sorted(each.index for each in choices) != list(range(len(choices))) or not choices:
            raise invalid(
                "choices", f"must have the indexes 0 to n - 1, each once; there are {len(choices)}"
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


def reader_of(
    request: GenerationRequest, *, is_request_known: bool, needs_each: bool = True
) -> OutputReader:
    """For the choices of a request."""
    job = request.jobs[0]
    ends = frozenset(job.card.eos_token_ids) | frozenset(request.text.described.special_ids)
    return OutputReader(job.sampling if is_request_known else None, ends, needs_each)


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
        raise invalid("logprobs", "of some choices are missing")
    return any(has)


def _nothing_to_close() -> None:
    """There is no stream to close."""
