"""Outputs: what generate answered becomes what workers once sent, so that choices read it again."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from tokenmesh.services.gateway.mesh.session import Output
from tokenmesh.services.gateway.scale_out.derender_request import (
    LogprobCandidate,
    PromptCell,
    TokensChoice,
)
from tokenmesh.services.gateway.scale_out.token_logprobs import read
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs

PromptTable = dict[str, PromptCell] | None


@dataclass(frozen=True, slots=True)
class OutputReader:
    """Of one request."""

    sampling: SamplingParams | None
    """What generate was asked for; None: unknown."""
    end_ids: Set[int]
    """Tokens that end an answer and are no text."""

    def outputs(self, choice: TokensChoice, *, is_whole: bool) -> Iterator[Output]:
        """In order. `is_whole`: the choice has ended even if it does not say why."""
        ids, finish = choice.token_ids or [], choice.finish_reason
        logprobs = self._logprobs(choice)
        stop = choice.stop_reason
        stop_token = stop if isinstance(stop, int) else None
        if finish == "stop" and self._ends_with_stop(ids, stop):
            yield Output(ids, logprobs, finish, stop_token)
            return
        yield Output(ids, logprobs)
        if finish is not None or is_whole:
            # Apart from the last token: that one is text.
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
        own = table.get(str(own_id))
        if own is None or not all(key.isascii() and key.isdigit() for key in table):
            raise InvalidInput(
                f"prompt_logprobs: no entry for the prompt's token {own_id}",
                param="prompt_logprobs",
            )
        tops = [
            LogprobCandidate.model_construct(
                token_id=int(key), logprob=each.logprob, rank=each.rank
            )
            for key, each in table.items()
        ]
        first = LogprobCandidate.model_construct(
            token_id=own_id, logprob=own.logprob, rank=own.rank
        )
        count = None if self.sampling is None else self.sampling.prompt_logprobs
        return read(first, tops, count=count, named=())

    def _logprobs(self, choice: TokensChoice) -> list[TokenLogprobs] | None:
        content = None if choice.logprobs is None else choice.logprobs.content
        if content is None:
            return None
        if [each.token_id for each in content] != (choice.token_ids or []):
            raise InvalidInput(
                f"logprobs.content of choice {choice.index} is not of its token_ids",
                param="logprobs",
            )
        count = None if self.sampling is None else self.sampling.logprobs
        named = () if self.sampling is None else self.sampling.logprob_token_ids
        return [read(each, each.top_logprobs, count=count, named=named) for each in content]

    def _ends_with_stop(self, ids: Sequence[int], stop: int | str | None) -> bool:
        """Whether the last token has ended the choice."""
        if not ids or isinstance(stop, str):
            return False
        return ids[-1] == stop if stop is not None else ids[-1] in self.end_ids


def replayed(token_ids: list[int], *, has_logprobs: bool) -> Output:
    """Tokens that were shown before: only their lengths still count, not their probabilities."""
    logprobs = [TokenLogprobs(each, 0.0, 1) for each in token_ids] if has_logprobs else None
    return Output(list(token_ids), logprobs)
