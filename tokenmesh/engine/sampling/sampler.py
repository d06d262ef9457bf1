"""Sampler: the order in which logits become tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tokenmesh.engine.sampling.choice import ChoiceState
from tokenmesh.engine.sampling.grammars import GrammarState
from tokenmesh.engine.sampling.limits import BadWordState, VocabularyState
from tokenmesh.engine.sampling.logprobs import named_logprobs, token_logprobs
from tokenmesh.engine.sampling.penalties import PenaltyState
from tokenmesh.engine.sampling.row_states import RowStates, SamplerFeature
from tokenmesh.engine.sampling.speech import SpeechState
from tokenmesh.engine.sampling.thinking import ThinkingState
from tokenmesh.shared.messages.tokens import TokenLogprobs

NOT_FINITE = "the model computed logits that are not finite"
NOTHING_ALLOWED = (
    "the grammar, allowed_token_ids, bad words and min_tokens together leave no token to draw"
)


@dataclass(frozen=True, slots=True)
class Draw:
    """A token and, if requested, its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Draws:
    """The outcome of one step. Every row is in `draw_by_row` or in `errors`."""

    draw_by_row: dict[int, Draw] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    non_retryable: set[int] = field(default_factory=set)
    """Rows of `errors` that would fail on every worker."""

    def give_up(self, number: int, error: str) -> None:
        """Fail a row whose own parameters leave no token, which no retry changes."""
        self.errors[number] = error
        self.non_retryable.add(number)


class _HostState(SamplerFeature, Protocol):
    def append(self, number: int, token_id: int) -> None:
        """A row has drawn a token."""


class Sampler(RowStates[_HostState]):
    """The sampling state of all rows, on the CPU."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        grammar_step_s: float = math.inf,
        *,
        shows_processed: bool = False,
    ) -> None:
        """A grammar that takes longer for a step fails its row.

        `shows_processed`: log-probabilities are of what is drawn from, not of the model.
        """
        self._shows_processed = shows_processed
        self._grammars = GrammarState(vocab_size, eos_token_ids, grammar_step_s)
        self._vocabulary = VocabularyState(vocab_size, eos_token_ids)
        self._penalties = PenaltyState(vocab_size)
        self._bad_words = BadWordState(vocab_size)
        self._thinking = ThinkingState()
        self._speech = SpeechState()
        self._choice = ChoiceState(vocab_size)
        self._changing = (
            self._grammars,
            self._vocabulary,
            self._penalties,
            self._bad_words,
            self._thinking,
            self._speech,
        )
        """Features that change logits, in their order."""
        super().__init__((*self._changing, self._choice))

    def draw(self, numbers: Sequence[int], logits: torch.Tensor) -> Draws:
        """Draw one token for each row; logits [N, V] are overwritten."""
        changed = len(self._num_logprobs) + sum(len(state) for state in self._changing)
        is_plain = self._choice.is_greedy and not changed
        is_sound = [] if is_plain else _repair(logits)
        asked = [i for i, number in enumerate(numbers) if number in self._num_logprobs]
        raw = logits[asked] if asked else None

        failed = self._grammars.apply(logits, numbers)
        self._vocabulary.apply(logits, numbers)
        self._penalties.apply(logits, numbers)
        self._bad_words.apply(logits, numbers)
        self._thinking.apply(logits, numbers)
        self._speech.apply(logits, numbers)
        tokens = self._choice.apply(logits, numbers)
        if raw is not None and self._shows_processed:
            raw = self._choice.kept(logits[asked], [numbers[i] for i in asked])

        token_ids, values = tokens.tolist(), logits.numpy()
        is_possible = [math.isfinite(values[each]) for each in enumerate(token_ids)]
        if is_plain:
            # the logits are unchanged and the largest is drawn, or the first NaN
            is_sound = is_possible
        logprobs = {} if raw is None else self._logprobs(raw, tokens, asked, numbers)
        draws = Draws()
        for index, (number, token_id) in enumerate(zip(numbers, token_ids, strict=True)):
            if not is_sound[index]:
                draws.errors[number] = NOT_FINITE
            elif number in failed:
                draws.give_up(number, failed[number])
            elif not is_possible[index]:
                draws.give_up(number, NOTHING_ALLOWED)
            else:
                draws.draw_by_row[number] = Draw(token_id, logprobs.get(index))
                for state in self._states:
                    state.append(number, token_id)
        return draws

    def _logprobs(
        self, raw: torch.Tensor, tokens: torch.Tensor, asked: list[int], numbers: Sequence[int]
    ) -> dict[int, TokenLogprobs]:
        """By batch index. Rows may have different numbers of alternatives."""
        counts = [self._num_logprobs[numbers[index]] for index in asked]
        entries = token_logprobs(raw, tokens[asked], max(counts))
        shown = {}
        for place, (index, entry, count) in enumerate(zip(asked, entries, counts, strict=True)):
            ids, values = entry.top_ids[:count], entry.top_logprobs[:count]
            named = self._named.get(numbers[index])
            if named is not None:
                ids, values = named, named_logprobs(raw[place], named)
            shown[index] = TokenLogprobs(entry.token_id, entry.logprob, entry.rank, ids, values)
        return shown


def _repair(logits: torch.Tensor) -> list[bool]:
    """Whether each row's largest logit is a finite number; other rows [N, V] become zeros."""
    # numpy: torch takes longer to wake its threads than numpy for the whole vocabulary
    is_sound: list[bool] = np.isfinite(logits.numpy().max(-1)).tolist()
    if not all(is_sound):
        logits[[i for i, sound in enumerate(is_sound) if not sound]] = 0.0
    return is_sound
