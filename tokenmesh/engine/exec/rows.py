"""HostRows: what the runner keeps of each request from its admission to its end or preemption."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tokenmesh.engine.exec.media import (
    MediaPatch,
    PositionsOf,
    PromptPositions,
    patches_of,
    positions_of_prompt,
    states_of,
)
from tokenmesh.engine.exec.placeholders import within_vocabulary
from tokenmesh.engine.media_facts import MediaFacts
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.plan import NewRow, ScheduledRow
from tokenmesh.kernels.lora import LoraWeights

_NO_BLOCKS: Final[list[int]] = []


@dataclass(slots=True)
class Row:
    token_ids: list[int]
    num_prompt: int
    min_length: int
    """See `ModelFacts.min_length`."""
    num_blocks: int
    patches: list[MediaPatch]
    prompt_logprobs: int | None
    """It says how many to report for each prompt token; None: none."""
    states: torch.Tensor | None = None
    """These are the states of an encoder, until they are written to cross pages."""
    adapter: LoraWeights | None = None
    error: str | None = None
    """Why this request cannot be computed."""
    whole_runs: tuple[tuple[int, int], ...] = ()
    """See `RequestSpec.whole_runs`."""
    positions: PromptPositions | None = None
    """None: they count from 0 in every row of positions."""


class HostRows:
    """All rows and their block tables. Row numbers are the scheduler's."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        facts: ModelFacts,
        num_windowed: int = 0,
        num_tables: int = 0,
    ) -> None:
        """num_tables: besides those of rows."""
        self.tables = torch.zeros((max_num_seqs + num_tables, max_blocks), dtype=torch.int64)
        """[rows + num_tables, max_blocks]; entries past a row's end are the null block, 0."""
        self.windowed_tables = [torch.zeros_like(self.tables) for _ in range(num_windowed)]
        """These are the tables of each window group. What is behind the window is out of date, and
        not read."""
        self._entries = self.tables.numpy()
        self._windowed = [_WindowTable(table.numpy()) for table in self.windowed_tables]
        self._facts = facts
        self.position_rows = facts.media.position_rows
        self.has_media_steps = facts.media != MediaFacts(facts.media.kinds)
        """It tells whether the model needs a `StepMedia`."""
        self._row_by_number: dict[int, Row] = {}
        self.num_adapted = 0
        """Rows that have an adapter."""

    def __getitem__(self, number: int) -> Row:
        return self._row_by_number[number]

    def get(self, number: int) -> Row | None:
        """Return what is kept of a row; None for an empty one."""
        return self._row_by_number.get(number)

    def add(self, new: NewRow, positions_of: PositionsOf | None = None) -> None:
        """Take a request, whatever the row held before."""
        self.remove(new.row)
        patches: list[MediaPatch] = []
        states: torch.Tensor | None = None
        if self._facts.encoder_states:
            states, error = states_of(new, self._facts)
        else:
            patches, error = patches_of(new, self._facts)
        positions, problem = positions_of_prompt(new, self._facts, positions_of)
        error = problem or error
        new = within_vocabulary(new, self._facts.vocab_size)
        token_ids = list(new.token_ids)
        largest = max(token_ids)
        if largest >= self._facts.vocab_size:
            error = f"token id {largest} is not in the vocabulary of {self._facts.vocab_size}"
            token_ids = [0] * len(token_ids)
        self._row_by_number[new.row] = Row(
            token_ids=token_ids,
            num_prompt=new.num_prompt,
            min_length=self._facts.min_length(new.num_prompt, len(token_ids)),
            num_blocks=0,
            patches=patches,
            prompt_logprobs=new.sampling.prompt_logprobs if new.wants_prompt_logprobs else None,
            states=states,
            error=error,
            whole_runs=self._facts.media.whole_runs(new.media),
            positions=positions,
            adapter=adapter_of(new),
        )
        self.num_adapted += new.adapter is not None

    def remove(self, number: int) -> None:
        """Forget a request; nothing happens for an empty row."""
        row = self._row_by_number.pop(number, None)
        if row is not None:
            self.num_adapted -= row.adapter is not None
            self.tables[number, : row.num_blocks] = 0
            for table in self._windowed:
                table.remove(number)

    def fail(self, number: int, error: str) -> None:
        """The request cannot go on. A step that is already launched gets a token to compute."""
        row = self._row_by_number[number]
        row.error = error
        row.token_ids.append(0)

    def next_tokens(self, numbers: Sequence[int]) -> list[ScheduledRow]:
        """The entries of rows that decode: each computes its last known token."""
        rows = self._row_by_number
        return [
            ScheduledRow(number, len(rows[number].token_ids) - 1, 1, _NO_BLOCKS, True)
            for number in numbers
        ]

    def append_block(self, number: int, block: int) -> None:
        """Extend a decoding row's table by a block."""
        row = self._row_by_number[number]
        self._entries[number, row.num_blocks] = block
        row.num_blocks += 1

    def append_windowed(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        """Extend a row's table of each window group."""
        for table, new in zip(self._windowed, blocks, strict=True):
            table.append(number, new)

    def schedule(self, entry: ScheduledRow) -> None:
        """Extend the row's tables by its new blocks."""
        if entry.new_blocks:
            row = self._row_by_number[entry.row]
            first, blocks = row.num_blocks, entry.new_blocks
            row.num_blocks = first + len(blocks)
            self._entries[entry.row, first : row.num_blocks] = blocks
        if entry.new_windowed:
            self.append_windowed(entry.row, entry.new_windowed)


def adapter_of(new: NewRow) -> LoraWeights | None:
    """The matrices of its adapter."""
    assert new.adapter is None or isinstance(new.adapter, LoraWeights)
    return new.adapter


class _WindowTable:
    """The tables of one window group, and how long each row's is."""

    def __init__(self, entries: npt.NDArray[np.int64]) -> None:
        self._entries = entries
        self._lengths = [0] * len(entries)

    def remove(self, number: int) -> None:
        self._entries[number, : self._lengths[number]] = 0
        self._lengths[number] = 0

    def append(self, number: int, blocks: Sequence[int]) -> None:
        first = self._lengths[number]
        self._lengths[number] = first + len(blocks)
        self._entries[number, first : first + len(blocks)] = blocks
