"""DeviceSampler: the sampler's twin for a device, from logits to tokens without waiting.

It draws what `Sampler` draws. Parameters live in device rows and are written by `apply`; `draw`
launches kernels and returns tensors; `DeviceDraws.read` waits for them and returns `Draws`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.layers.upload import upload
from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.choice import GREEDY_BELOW, has_filter, signed64
from tokenmesh.engine.sampling.device_grammars import (
    DeviceGrammars,
    DeviceStepGrammars,
)
from tokenmesh.engine.sampling.device_limits import DeviceLimits
from tokenmesh.engine.sampling.device_penalties import DevicePenalties
from tokenmesh.engine.sampling.device_tables import DeviceTables, Shape
from tokenmesh.engine.sampling.device_thinking import DeviceThinking
from tokenmesh.engine.sampling.row_states import RowStates, SamplerFeature
from tokenmesh.engine.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, Draw, Draws
from tokenmesh.kernels.logit_bias import logit_bias, record
from tokenmesh.kernels.logprobs import Logprobs, logprobs
from tokenmesh.kernels.penalties import count_tokens, penalties
from tokenmesh.kernels.sample import NOT_FINITE as LOGITS_NOT_FINITE
from tokenmesh.kernels.sample import SOUND, ChoiceRows, sample


class DeviceChoice:
    """It says how each row chooses a token."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        dtypes = {
            "temperature": torch.float32,
            "min_p": torch.float32,
            "top_k": torch.int32,
            "top_p": torch.float64,
            "seed": torch.int64,
        }
        shapes = {name: Shape(max_num_seqs, 1, dtype) for name, dtype in dtypes.items()}
        self._tables = DeviceTables.zeros(shapes, device)
        self.rows = ChoiceRows(**{name: self._tables.column(name) for name in dtypes})
        self._filtered: set[int] = set()

    def add(self, new: NewRow) -> None:
        params = new.sampling
        is_greedy = params.temperature < GREEDY_BELOW
        if not is_greedy and has_filter(params):
            self._filtered.add(new.row)
        values = {
            "temperature": 0.0 if is_greedy else params.temperature,
            "min_p": params.min_p,
            "top_k": min(params.top_k, self._vocab_size),
            "top_p": params.top_p,
            "seed": signed64(params.seed),
        }
        for name, value in values.items():
            self._tables.stage_number(name, new.row, value)

    def remove(self, number: int) -> None:
        """Forget a row; its values on the device are overwritten by the next one's."""
        self._filtered.discard(number)

    def apply(self) -> None:
        self._tables.apply()

    def has_filter(self, number: int) -> bool:
        """Return whether a row draws from less than the vocabulary."""
        return number in self._filtered


@dataclass(frozen=True, slots=True)
class Needs:
    """It holds what the rows of one batch need; kernels for the rest are not launched."""

    has_filters: bool = False
    has_limits: bool = False
    has_penalties: bool = False
    has_budgets: bool = False
    grammars: DeviceStepGrammars | None = None
    num_top_by_index: tuple[tuple[int, int], ...] = ()
    """By batch row with log-probabilities: how many alternatives."""
    named_by_index: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """By batch row with log-probabilities of named tokens: which."""

    @property
    def num_shown(self) -> list[tuple[int, int]]:
        """For batch rows with log-probabilities: how many tokens each reports."""
        named = dict(self.named_by_index)
        return [(i, len(named[i]) if i in named else n) for i, n in self.num_top_by_index]

    @property
    def is_fixed(self) -> bool:
        """Return whether the same launches with the same memory serve other batches: a graph may
        hold it.

        Other tables grow, and the rows with log-probabilities differ from step to step.
        """
        return not (self.changes_logits or self.num_top_by_index)

    @property
    def changes_logits(self) -> bool:
        """Return whether something is done to the logits before the draw."""
        is_left = self.has_limits or self.has_penalties or self.has_budgets
        return is_left or self.grammars is not None


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """The outcome of one step, on the device."""

    drawn: torch.Tensor
    """int64 [2, N]: tokens, then flaws; what one copy to the host has to bring."""
    logprobs: Logprobs | None
    needs: Needs

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [N]; 0 where there is a flaw."""
        return self.drawn[0]

    def read(self, numbers: Sequence[int]) -> Draws:
        """Wait for it; numbers are the rows of the batch, padding left out."""
        tokens, flaws = self.drawn.tolist()
        entries = self._entries(tokens)
        draws = Draws()
        for index, number in enumerate(numbers):
            if flaws[index] == SOUND:
                draws.draws_by_row[number] = [Draw(tokens[index], entries.get(index))]
            elif flaws[index] == LOGITS_NOT_FINITE:
                draws.errors[number] = NOT_FINITE
            else:
                draws.give_up(number, NOTHING_ALLOWED)
        return draws

    def _entries(self, tokens: list[int]) -> dict[int, TokenLogprobs]:
        if self.logprobs is None:
            return {}
        answer = self.logprobs
        columns = (answer.chosen, answer.ranks, answer.top_ids, answer.top)
        chosen, ranks, top_ids, top = (column.tolist() for column in columns)
        return {
            index: TokenLogprobs(
                tokens[index], chosen[a], ranks[a], top_ids[a][:count], top[a][:count]
            )
            for a, (index, count) in enumerate(self.needs.num_shown)
        }


class _StagedState(SamplerFeature, Protocol):
    def apply(self) -> None:
        """Send what was staged."""


class DeviceSampler(RowStates[_StagedState]):
    """The sampling state of all rows, on a device: `add` and `remove` are staged until `apply`."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        grammar_step_s: float = math.inf,
    ) -> None:
        """A grammar that takes longer for a step fails its row."""
        self._vocab_size = vocab_size
        self._grammars = DeviceGrammars(vocab_size, eos_token_ids, grammar_step_s)
        self._choice = DeviceChoice(max_num_seqs, vocab_size, device)
        self._limits = DeviceLimits(max_num_seqs, vocab_size, eos_token_ids, device)
        self._penalties = DevicePenalties(max_num_seqs, vocab_size, device)
        self._thinking = DeviceThinking(max_num_seqs, device)
        super().__init__(
            (self._choice, self._limits, self._penalties, self._thinking, self._grammars)
        )

    def apply(self) -> None:
        """Send what was staged; call it after the last add or remove of a step, before `draw`."""
        for state in self._states:
            state.apply()

    def needs(self, numbers: Sequence[int]) -> Needs:
        """Return what a batch of these rows needs."""
        return Needs(
            has_filters=any(self._choice.has_filter(number) for number in numbers),
            has_limits=any(number in self._limits for number in numbers),
            has_penalties=any(number in self._penalties for number in numbers),
            has_budgets=any(number in self._thinking for number in numbers),
            grammars=self._grammars.of(numbers),
            num_top_by_index=tuple(
                (index, min(self._num_logprobs[number], self._vocab_size))
                for index, number in enumerate(numbers)
                if number in self._num_logprobs
            ),
            named_by_index=tuple(
                (index, tuple(self._named[number]))
                for index, number in enumerate(numbers)
                if number in self._named
            ),
        )

    def draw(
        self,
        needs: Needs,
        idx_mapping: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
    ) -> DeviceDraws:
        """Draw one token for each row; float32 logits [N, V] may be overwritten.

        idx_mapping int32 [N]: row numbers, -1 for padding; positions int64 [N]: how many tokens
        each row has generated. Waits for nothing; grammars must know all tokens before this one.
        """
        raw = logits
        if needs.changes_logits:
            # log-probabilities are those of the model
            logits = logits.clone() if needs.num_top_by_index else logits
            logits = logits.float()
        is_sound = raw.amax(-1).isfinite() if needs.has_budgets else None
        marks = None if needs.grammars is None else needs.grammars.apply(logits)
        if needs.has_limits:
            hidden = logit_bias(logits, idx_mapping, positions, self._limits.rows)
            marks = hidden if marks is None else marks | hidden
        if needs.has_penalties:
            penalties(logits, idx_mapping, self._penalties.rows)
        if is_sound is not None:
            self._thinking.force(logits, idx_mapping, is_sound)
        drawn = sample(logits, idx_mapping, positions, self._choice.rows, marks, needs.has_filters)
        tokens, flaws = drawn
        if needs.has_limits:
            record(tokens, flaws, idx_mapping, self._limits.rows)
        if needs.has_penalties:
            count_tokens(tokens, flaws, idx_mapping, self._penalties.rows)
        if needs.has_budgets:
            self._thinking.record(tokens, idx_mapping)
        return DeviceDraws(drawn, _logprobs(raw, tokens, needs), needs)


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, needs: Needs) -> Logprobs | None:
    if not needs.num_top_by_index:
        return None
    indices, counts = zip(*needs.num_top_by_index, strict=True)
    asked = upload(torch.tensor(indices, dtype=torch.int32), raw.device)
    answer = logprobs(raw, asked, tokens, max(counts))
    return answer if not needs.named_by_index else _with_named(answer, raw, needs)


def _with_named(answer: Logprobs, raw: torch.Tensor, needs: Needs) -> Logprobs:
    """The same with wider lists that hold the named tokens of the rows that name some."""
    named = dict(needs.named_by_index)
    width = max(answer.top_ids.shape[1], *map(len, named.values()))
    num_missing = width - answer.top_ids.shape[1]
    top_ids = torch.nn.functional.pad(answer.top_ids, (0, num_missing))
    top = torch.nn.functional.pad(answer.top, (0, num_missing))
    for place, (index, _) in enumerate(needs.num_top_by_index):
        if index in named:
            ids = upload(torch.tensor(named[index], dtype=torch.int32), raw.device)
            row = raw[index].float()
            top_ids[place, : len(ids)] = ids
            top[place, : len(ids)] = row[ids.long()] - row.logsumexp(-1)
    return Logprobs(answer.chosen, answer.ranks, top_ids, top)
