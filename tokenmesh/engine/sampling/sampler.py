"""Sampler: the order in which logits become tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.choice import ChoiceState, Judged
from tokenmesh.engine.sampling.grammars import GrammarState
from tokenmesh.engine.sampling.limits import BadWordState, VocabularyState
from tokenmesh.engine.sampling.logprobs import named_logprobs, token_logprobs
from tokenmesh.engine.sampling.penalties import PenaltyState
from tokenmesh.engine.sampling.row_states import RowStates, SamplerFeature
from tokenmesh.engine.sampling.speech import SpeechState
from tokenmesh.engine.sampling.thinking import ThinkingState

NOT_FINITE = "the model computed logits that are not finite"
NOTHING_ALLOWED = (
    "the grammar, allowed_token_ids, bad words and min_tokens together leave no token to draw"
)


@dataclass(frozen=True, slots=True)
class Draw:
    """A token and, if requested, its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of one row that samples."""

    row: int
    token_ids: list[int]
    first: int
    """This is the first of the places in the logits for what is drawn after each of them."""
    probs: Sequence[torch.Tensor] = ()
    """Each was drawn with these [V], apart from the row's noise; empty: with the noise."""


@dataclass(slots=True)
class Draws:
    """The outcome of one step. Every row is in `draws_by_row` or in `errors`."""

    draws_by_row: dict[int, list[Draw]] = field(default_factory=dict)
    """One, and one more after each draft that was right."""
    errors: dict[int, str] = field(default_factory=dict)
    non_retryable: set[int] = field(default_factory=set)
    """Rows of `errors` that would fail on every worker."""

    def give_up(self, number: int, error: str) -> None:
        """Fail a row whose own parameters leave no token, which no retry changes."""
        self.errors[number] = error
        self.non_retryable.add(number)

    @property
    def draw_by_row(self) -> dict[int, Draw]:
        """The first of each row."""
        return {row: draws[0] for row, draws in self.draws_by_row.items()}


@dataclass(frozen=True, slots=True)
class _Drawn:
    """By place of a batch."""

    token_ids: list[int]
    is_sound: list[bool]
    is_possible: list[bool]
    failed: Mapping[int, str]
    """By row: why its grammar allows nothing."""
    logprobs: dict[int, TokenLogprobs]

    def problem(self, index: int, number: int) -> str | None:
        """Why the row could not draw there; None: it could."""
        if not self.is_sound[index]:
            return NOT_FINITE
        if number in self.failed:
            return self.failed[number]
        return None if self.is_possible[index] else NOTHING_ALLOWED


class RowSampler(Protocol):
    """Draws for the rows of a runner."""

    def add(self, new: NewRow) -> None:
        """Take a row's sampling state."""

    def remove(self, number: int) -> None:
        """Forget a row; nothing happens for an unknown one."""

    def draw(
        self, numbers: Sequence[int], logits: torch.Tensor, drafted: Sequence[Drafted] = ()
    ) -> Draws:
        """Draw for each row; each is among the draws or the errors, see `Sampler.draw`."""


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
        self._following = (
            self._grammars,
            self._penalties,
            self._bad_words,
            self._thinking,
            self._speech,
        )
        """Those of them that depend on which tokens a row drew."""
        super().__init__((*self._changing, self._choice))

    def draw(
        self, numbers: Sequence[int], logits: torch.Tensor, drafted: Sequence[Drafted] = ()
    ) -> Draws:
        """Draw one token for each row; logits [N + D, V] are overwritten.

        A row of `drafted` draws on from its places among the D for as long as its drafts are what
        it drew; of several chains of drafts the one that it follows furthest counts. Where it can
        draw no further, the step after says so.
        """
        at_once = [each for each in drafted if not self._depends_on_draws(each.row)]
        rows = [*numbers, *(each.row for each in at_once for _ in each.token_ids)]
        ahead = [0] * len(numbers)
        judged = _judged(numbers, at_once)
        places = list(range(len(numbers)))
        for each in at_once:
            ahead += range(1, len(each.token_ids) + 1)
            places += range(each.first, each.first + len(each.token_ids))
        # a copy only where rows in between are drawn place by place
        chosen = logits if len(places) == logits.shape[0] else logits[places]
        drawn = self._draw(rows, chosen, ahead, judged)
        draws = Draws()
        for index, number in enumerate(numbers):
            self._note(draws, drawn, index, number)
        index = len(numbers)
        for each in at_once:
            so_far = draws.draws_by_row.get(each.row, [])
            # of several chains another may have brought the row further
            while 0 < len(so_far) <= len(each.token_ids) and _follows(so_far, each):
                place = index + len(so_far) - 1
                if drawn.problem(place, each.row) is not None:
                    break
                self._note(draws, drawn, place, each.row)
            index += len(each.token_ids)
        if drafted:
            one_by_one = [each for each in drafted if each not in at_once]
            self._draw_place_by_place(one_by_one, logits, draws)
        return draws

    def guess(self, numbers: Sequence[int], logits: torch.Tensor, ahead: int) -> list[int]:
        """Return what rows would draw, so many tokens after their next one, from logits [N, V] that
        are like the model's, and are overwritten. Nothing is noted.

        What depends on the tokens in between is as it is before them, and grammars are not followed
        past the next token.
        """
        places = self._allow_guesses(numbers, logits, ahead)
        token_ids: list[int] = self._choice.apply(logits, numbers, places).tolist()
        return token_ids

    def guess_several(
        self, numbers: Sequence[int], logits: torch.Tensor, ahead: int, count: int
    ) -> list[list[int]]:
        """Guess as `guess` does, and what rows would draw if they could not draw that, and so on:
        `count` tokens for each."""
        places = self._allow_guesses(numbers, logits, ahead)
        found = []
        for _ in range(count):
            tokens = self._choice.apply(logits, numbers, places)
            logits[torch.arange(len(tokens)), tokens] = -math.inf
            found.append(tokens)
        guesses: list[list[int]] = torch.stack(found, dim=1).tolist()
        return guesses

    def guess_apart(
        self, numbers: Sequence[int], logits: torch.Tensor, ahead: int
    ) -> tuple[list[int], list[torch.Tensor | None]]:
        """Guess with a noise that is not the rows' own; also return the probabilities [V], None for
        rows that are greedy."""
        places = self._allow_guesses(numbers, logits, ahead)
        tokens, probs = self._choice.draw_apart(logits, numbers, places)
        return tokens.tolist(), probs

    def _allow_guesses(self, numbers: Sequence[int], logits: torch.Tensor, ahead: int) -> list[int]:
        """Change logits by what is known of the places, which it returns: `ahead` for each."""
        _repair(logits)
        places = [ahead] * len(numbers)
        if not ahead:
            self._grammars.apply(logits, numbers)
        self._vocabulary.apply(logits, numbers, places)
        self._penalties.apply(logits, numbers)
        if not ahead:
            self._bad_words.apply(logits, numbers)
            self._thinking.apply(logits, numbers)
            self._speech.apply(logits, numbers)
        return places

    def _draw_place_by_place(
        self, drafted: Sequence[Drafted], logits: torch.Tensor, draws: Draws
    ) -> None:
        """Draw for rows whose logits depend on what they drew before."""
        for place in range(max((len(each.token_ids) for each in drafted), default=0)):
            drafted = [
                each
                for each in drafted
                if place < len(each.token_ids)
                and [draw.token_id for draw in draws.draws_by_row.get(each.row, [])[place:]]
                == each.token_ids[place : place + 1]
            ]
            # chains of a row that agree so far have the same logits
            one_by_row = {each.row: each for each in drafted}
            rows = list(one_by_row)
            if not rows:
                return
            at = [each.first + place for each in one_by_row.values()]
            drawn = self._draw(rows, logits[at], [0] * len(rows))
            for index, number in enumerate(rows):
                if drawn.problem(index, number) is None:
                    self._note(draws, drawn, index, number)

    def _depends_on_draws(self, number: int) -> bool:
        """Return whether what the row drew changes its next logits by more than a count."""
        return any(number in state for state in self._following)

    def _note(self, draws: Draws, drawn: "_Drawn", index: int, number: int) -> None:
        problem = drawn.problem(index, number)
        if problem == NOT_FINITE:
            draws.errors[number] = problem
            return
        if problem is not None:
            draws.give_up(number, problem)
            return
        token_id = drawn.token_ids[index]
        draw = Draw(token_id, drawn.logprobs.get(index))
        draws.draws_by_row.setdefault(number, []).append(draw)
        for state in self._states:
            state.append(number, token_id)

    def _draw(
        self,
        numbers: Sequence[int],
        logits: torch.Tensor,
        ahead: Sequence[int],
        judged: Mapping[int, Judged] = MappingProxyType({}),
    ) -> "_Drawn":
        """A token for each of these places of rows, `ahead` of the next one; nothing is noted."""
        changed = len(self._num_logprobs) + sum(len(state) for state in self._changing)
        is_plain = self._choice.is_greedy and not changed
        is_sound = [] if is_plain else _repair(logits)
        asked = [i for i, number in enumerate(numbers) if number in self._num_logprobs]
        raw = logits[asked] if asked else None

        failed: Mapping[int, str] = {}
        if not is_plain:
            failed = self._grammars.apply(logits, numbers)
            self._vocabulary.apply(logits, numbers, ahead)
            self._penalties.apply(logits, numbers)
            self._bad_words.apply(logits, numbers)
            self._thinking.apply(logits, numbers)
            self._speech.apply(logits, numbers)
        spoken = [i for i, at in enumerate(asked) if numbers[at] in self._speech]
        ruled = logits[[asked[i] for i in spoken]] if spoken else None
        tokens = self._choice.apply(logits, numbers, ahead)
        if judged:
            at = list(judged)
            spots = [(numbers[i], ahead[i]) for i in at]
            tokens[at] = self._choice.judge(logits[at], spots, list(judged.values()))
        if raw is not None and self._shows_processed:
            raw = self._choice.kept(logits[asked], [numbers[i] for i in asked])
        if raw is not None and ruled is not None:
            # who judges a transcript compares it with what its rules allow, at any temperature
            raw[spoken] = ruled

        token_ids, values = tokens.tolist(), logits.numpy()
        is_possible = [math.isfinite(values[each]) for each in enumerate(token_ids)]
        if is_plain:
            # the logits are unchanged and the largest is drawn, or the first NaN
            is_sound = is_possible
        logprobs = {} if raw is None else self._logprobs(raw, tokens, asked, numbers)
        return _Drawn(token_ids, is_sound, is_possible, failed, logprobs)

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


def _follows(draws: Sequence[Draw], drafted: Drafted) -> bool:
    """Return whether a row drew what a chain of drafts begins with."""
    return [draw.token_id for draw in draws] == drafted.token_ids[: len(draws)]


def _judged(numbers: Sequence[int], drafted: Sequence[Drafted]) -> dict[int, Judged]:
    """The drafts that were drawn apart, each by the place of a batch where its row draws the token
    that it guesses. In a batch the places of all drafts stand behind those of rows."""
    found: dict[int, Judged] = {}
    if not any(each.probs for each in drafted):
        return found
    place_of = {number: index for index, number in enumerate(numbers)}
    first = len(numbers)
    for each in drafted:
        spots = [place_of[each.row], *range(first, first + len(each.token_ids) - 1)]
        for spot, token, probs in zip(spots, each.token_ids, each.probs, strict=False):
            found[spot] = Judged(token, probs)
        first += len(each.token_ids)
    return found


def _repair(logits: torch.Tensor) -> list[bool]:
    """Return whether each row's largest logit is a finite number; other rows [N, V] become
    zeros.
    """
    # numpy: torch takes longer to wake its threads than numpy for the whole vocabulary
    is_sound: list[bool] = np.isfinite(logits.numpy().max(-1)).tolist()
    if not all(is_sound):
        logits[[i for i, sound in enumerate(is_sound) if not sound]] = 0.0
    return is_sound
