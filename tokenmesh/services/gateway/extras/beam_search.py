"""BeamSearch: selects continuations of a prompt by their log-probabilities. No I/O.

vLLM's rules: the 2 * width most likely tokens of every beam are candidates, an end token completes
the beam, and the `width` best of the others continue. Beams are compared by the sum of the model's
own log-probabilities, complete ones by that sum divided by length ** length_penalty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokenmesh.services.gateway.generation.request import BeamOptions
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    """Includes the token that ended it."""
    cumulative: float = 0.0
    """Sum of log-probabilities."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason = "length"
    stop_token: int | None = None

    def score(self, num_prompt: int, length_penalty: float) -> float:
        """For comparing complete beams; the prompt counts towards the length, as in vLLM."""
        length = num_prompt + len(self.token_ids) - (self.finish == "stop")
        return normalized(self.cumulative, length, length_penalty)

    def grown(self, chosen: TokenLogprobs) -> "Beam":
        """The beam with one more token."""
        return Beam(
            (*self.token_ids, chosen.token_id),
            self.cumulative + chosen.logprob,
            (*self.logprobs, chosen),
        )


class BeamSearch:
    """The state of one search."""

    def __init__(self, options: BeamOptions, num_prompt: int, max_tokens: int) -> None:
        self.open: list[Beam] = [Beam()]
        """Beams that continue, best first; all have the same length."""
        self._options = options
        self._num_prompt = num_prompt
        self._max_tokens = max_tokens
        self._complete: list[Beam] = []

    @property
    def is_over(self) -> bool:
        """Whether no further token can change the answers."""
        if not self.open or len(self.open[0].token_ids) >= self._max_tokens:
            return True
        if len(self._complete) < self._options.width:
            return False
        worst = self._score(self._best_complete()[-1])
        return all(self._most(beam) <= worst for beam in self.open)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Extend the open beams by one token; `entries` are theirs, in order."""
        candidates: list[tuple[float, Beam, TokenLogprobs]] = []
        for beam, entry in zip(self.open, entries, strict=True):
            for chosen in _choices(entry):
                total = beam.cumulative + chosen.logprob
                if chosen.token_id in self._options.end_ids:
                    self._complete.append(replace(beam.grown(chosen), finish="stop"))
                elif (token_id := chosen.token_id) in self._options.stop_ids:
                    ended = replace(beam.grown(chosen), finish="stop", stop_token=token_id)
                    self._complete.append(ended)
                else:
                    candidates.append((total, beam, chosen))
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        best = candidates[: self._options.width]
        self.open = [beam.grown(chosen) for _, beam, chosen in best]

    def answers(self) -> list[Beam]:
        """The `width` best beams, best first; open ones count as cut by length."""
        found = [*self._complete, *self.open]
        return sorted(found, key=self._score, reverse=True)[: self._options.width]

    def _best_complete(self) -> list[Beam]:
        """Drop all complete beams but the `width` best."""
        best = sorted(self._complete, key=self._score, reverse=True)
        self._complete = best[: self._options.width]
        return self._complete

    def _score(self, beam: Beam) -> float:
        return beam.score(self._num_prompt, self._options.length_penalty)

    def _most(self, beam: Beam) -> float:
        """An upper bound of the scores of its continuations: sums only fall, lengths only grow."""
        penalty = self._options.length_penalty
        longest = self._num_prompt + self._max_tokens
        shortest = self._num_prompt + len(beam.token_ids)
        return normalized(beam.cumulative, longest if penalty > 0 else shortest, penalty)


def normalized(cumulative: float, length: int, length_penalty: float) -> float:
    """A sum of log-probabilities divided by length ** length_penalty."""
    return cumulative / float(length**length_penalty)


def _choices(entry: TokenLogprobs) -> Iterator[TokenLogprobs]:
    """One entry for each candidate token, as if it had been drawn."""
    ranked = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
    for rank, (token_id, logprob) in ranked:
        yield TokenLogprobs(token_id, logprob, rank, entry.top_ids, entry.top_logprobs)
