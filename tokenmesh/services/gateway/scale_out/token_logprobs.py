"""Log-probabilities as generate writes them, and back: nothing that a writer shows is lost."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from tokenmesh.services.gateway.scale_out.shapes import TokenCandidate, TokenLogprob
from tokenmesh.shared.messages.tokens import TokenLogprobs

_LEAST: Final = -9999.0
"""What vLLM shows for a probability of zero."""


class LogprobCandidate(Protocol):
    """A token at one position, as a client sends it back."""

    token_id: int
    logprob: float
    rank: int | None


def shown(entry: TokenLogprobs, *, are_named: bool) -> TokenLogprob:
    """`are_named`: the candidates are those that the client named, whose ranks are unknown."""
    own = TokenCandidate(entry.token_id, _finite(entry.logprob), entry.rank)
    others = [
        TokenCandidate(token_id, _finite(logprob), None if are_named else rank)
        for rank, (token_id, logprob) in enumerate(_tops(entry), start=1)
        if token_id != entry.token_id
    ]
    return TokenLogprob(own.token_id, own.logprob, own.rank, [own, *others])


def read(
    own: LogprobCandidate,
    tops: Sequence[LogprobCandidate],
    *,
    count: int | None,
    named: Sequence[int],
) -> TokenLogprobs:
    """The worker's entry again. `count` None: the request is unknown, `tops` count as they are."""
    if named:
        by_id = {each.token_id: each.logprob for each in tops}
        pairs = [(token_id, by_id[token_id]) for token_id in named if token_id in by_id]
    elif count is None:
        pairs = [(each.token_id, each.logprob) for each in tops]
    else:
        pairs = _by_rank(own, tops, count)
    ids, logprobs = [each for each, _ in pairs], [each for _, each in pairs]
    return TokenLogprobs(own.token_id, own.logprob, own.rank or 0, ids, logprobs)


def prompt_tables(
    entries: Sequence[TokenLogprobs | None], *, are_named: bool = False
) -> list[dict[str, Any] | None]:
    """vLLM's shape for prompts: by id, the prompt's own token first."""
    return [None if entry is None else _table(entry, are_named) for entry in entries]


def _table(entry: TokenLogprobs, are_named: bool) -> dict[str, Any]:
    return {
        str(each.token_id): {
            "logprob": each.logprob,
            "rank": each.rank,
            "decoded_token": None,
        }
        for each in shown(entry, are_named=are_named).top_logprobs
    }


def _by_rank(
    own: LogprobCandidate, tops: Sequence[LogprobCandidate], count: int
) -> list[tuple[int, float]]:
    """The `count` most likely: the place that no other candidate takes is the sampled token's."""
    slots: list[tuple[int, float] | None] = [None] * min(count, len(tops))
    for each in tops:
        if each.token_id != own.token_id and each.rank and each.rank <= len(slots):
            slots[each.rank - 1] = (each.token_id, each.logprob)
    if slots.count(None) == 1:
        slots[slots.index(None)] = (own.token_id, own.logprob)
    return [each for each in slots if each is not None]


def _tops(entry: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
