"""OutputReader: generate's response as the workers' outputs, so that choices can read it again."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from tokenmesh.services.gateway.generation.chunk import Output
from tokenmesh.services.gateway.scale_out.derender_request import (
    LogprobCandidate,
    PromptCell,
    TokensChoice,
)
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs

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
    """Of the generate request; None: unknown."""
    end_ids: Set[int]
    """Tokens that end an answer and are not part of its text."""

    def outputs(self, choice: TokensChoice, *, is_whole: bool) -> Iterator[Output]:
        """In order. `is_whole`: the choice has ended even without a finish reason."""
        ids, finish = choice.token_ids or [], choice.finish_reason
        logprobs = self._logprobs(choice)
        stop = choice.stop_reason
        stop_token = stop if isinstance(stop, int) else None
        if finish == "stop" and self._ends_with_stop(ids, stop):
            yield Output(ids, logprobs, finish, stop_token)
            return
        yield Output(ids, logprobs)
        if finish is not None or is_whole:
            # Apart from the last token, which is part of the text.
            yield Output(finish=finish or "stop", stop_token=stop_token)

    def prompt_logprobs(
        self, tables: Sequence[PromptTable], prompt_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        """Raises InvalidInput for tables that do not belong to the prompt."""
        if len(tables) != len(prompt_ids):
            raise InvalidInput(
                f"prompt_logprobs length ({len(tables)}) must equal prompt_token_ids length "
                f"({len(prompt_ids)})",
                param="prompt_logprobs",
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
        if [each.token_id for each in content] != (choice.token_ids or []):
            raise InvalidInput(
                f"logprobs.content of choice {choice.index} does not match its token_ids",
                param="logprobs",
            )
        count = None if self.sampling is None else self.sampling.logprobs
        named = () if self.sampling is None else self.sampling.logprob_token_ids
        return [
            read_logprobs(each, each.top_logprobs, count=count, named=named) for each in content
        ]

    def _ends_with_stop(self, ids: Sequence[int], stop: int | str | None) -> bool:
        """Whether the last token ended the choice."""
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
