"""CudaRows: what the host keeps of rows whose tokens and block tables are on the device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import torch

from tokenmesh.engine.exec.media import (
    MediaPatch,
    PositionsOf,
    PromptPositions,
    patches_of,
    positions_of_prompt,
)
from tokenmesh.engine.exec.rows import adapter_of
from tokenmesh.engine.layers.upload import upload
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.plan import NewRow, ScheduledRow
from tokenmesh.kernels.lora import LoraWeights
from tokenmesh.kernels.step_inputs import RowState
from tokenmesh.shared.config.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class CudaLimits:
    max_num_seqs: int
    max_tokens: int
    """It bounds the tokens of a step."""
    max_model_len: int
    steps_in_flight: int
    largest_graph: int
    """Rows; 0: no graphs."""
    max_loras: int = 0
    """Slots for adapters; 0: none are served."""
    max_lora_rank: int = 16

    @classmethod
    def of(cls, settings: WorkerSettings, max_model_len: int) -> Self:
        """From a worker's settings."""
        return cls(
            max_num_seqs=settings.max_num_seqs,
            max_tokens=settings.max_num_batched_tokens,
            max_model_len=max_model_len,
            # one that is launched while another waits to be read
            steps_in_flight=1 if settings.async_scheduling is False else 2,
            largest_graph=0 if settings.enforce_eager else settings.max_cudagraph_capture_size,
            max_loras=settings.lora.max_loras if settings.lora.enable_lora else 0,
            max_lora_rank=settings.lora.max_lora_rank,
        )


_UNKNOWN = -1
_NO_BLOCKS: Final[list[int]] = []


@dataclass(slots=True)
class DeviceRow:
    num_prompt: int
    patches: list[MediaPatch]
    """Their embeddings are on the device."""
    prompt: list[int]
    """Its tokens when their log-probabilities are wanted, else empty."""
    num_prompt_logprobs: int
    num_blocks: list[int]
    """It counts the blocks of each KV group."""
    num_computed: int = _UNKNOWN
    """Its value on the device after all that was launched."""
    error: str | None = None
    """Why this request cannot be computed."""
    adapter: LoraWeights | None = None
    whole_runs: tuple[tuple[int, int], ...] = ()
    """See `RequestSpec.whole_runs`."""
    positions: PromptPositions | None = None
    """In the host's memory; None: they count from 0 in every row of positions."""


class CudaRows:
    """Keeps the rows and collects what a step has to write into `state`."""

    def __init__(self, state: RowState, facts: ModelFacts, num_groups: int = 1) -> None:
        """num_groups: KV groups that `state` was made for."""
        self.state = state
        self._tables = [state.of_group(group).tables for group in range(num_groups)]
        self.writes: list[tuple[int, list[int]]] = []
        """Addresses in `state.flat` and the values to write there; they do not overlap."""
        self._facts = facts
        self.position_rows = facts.media.position_rows
        self._row_by_number: dict[int, DeviceRow] = {}
        self.adapters: Counter[LoraWeights] = Counter()
        """Those that rows have, and how many rows."""

    def __getitem__(self, number: int) -> DeviceRow:
        return self._row_by_number[number]

    def begin(self) -> None:
        """Begin a step. Writes that an earlier one did not send are dropped."""
        self.writes = []

    def remove(self, number: int) -> None:
        """Forget a request; nothing happens for an empty row."""
        row = self._row_by_number.pop(number, None)
        if row is not None and row.adapter is not None:
            self.adapters[row.adapter] -= 1
            if not self.adapters[row.adapter]:
                del self.adapters[row.adapter]

    def add(self, new: NewRow, positions_of: PositionsOf | None = None) -> None:
        """Take a request, whatever the row held before."""
        self.remove(new.row)
        state, device = self.state, self.state.flat.device
        assert len(new.token_ids) <= state.token_ids.shape[1], "admission lets no longer one in"
        patches, error = patches_of(new, self._facts)
        positions, problem = positions_of_prompt(new, self._facts, positions_of)
        error = problem or error
        token_ids, largest = new.token_ids, max(new.token_ids)
        if largest >= self._facts.vocab_size:
            error = f"token id {largest} is not in the vocabulary of {self._facts.vocab_size}"
            token_ids = [0] * len(token_ids)
        wanted = new.sampling.prompt_logprobs if new.wants_prompt_logprobs else None
        self._row_by_number[new.row] = DeviceRow(
            num_prompt=new.num_prompt,
            patches=[replace(p, embeddings=upload(p.embeddings, device)) for p in patches],
            prompt=[] if wanted is None else token_ids[: new.num_prompt],
            num_prompt_logprobs=wanted or 0,
            num_blocks=[0] * len(self._tables),
            error=error,
            adapter=adapter_of(new),
            whole_runs=self._facts.media.whole_runs(new.media),
            positions=positions,
        )
        if (adapter := self._row_by_number[new.row].adapter) is not None:
            self.adapters[adapter] += 1
        self._write(state.token_ids, new.row, 0, token_ids)
        min_length = self._facts.min_length(new.num_prompt, len(token_ids))
        self._write(state.min_length, new.row, 0, [min_length])

    def advance(self, numbers: Sequence[int]) -> list[ScheduledRow]:
        """The entries of rows that decode; their positions are known on the device."""
        entries = []
        for number in numbers:
            row = self._row_by_number[number]
            entries.append(ScheduledRow(number, row.num_computed, 1, _NO_BLOCKS, True))
            row.num_computed += 1
        return entries

    def append_block(self, number: int, block: int) -> None:
        """Extend a decoding row's table by a block."""
        self._append(number, [block], 0)

    def append_windowed(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        """Extend a row's table of each window group."""
        for group, new in enumerate(blocks, start=1):
            self._append(number, new, group)

    def _append(self, number: int, blocks: Sequence[int], group: int) -> None:
        if blocks:
            filled = self._row_by_number[number].num_blocks
            self._write(self._tables[group], number, filled[group], list(blocks))
            filled[group] += len(blocks)

    def schedule(self, entry: ScheduledRow) -> None:
        """Extend a row's tables, and write where its tokens begin if the device lacks it."""
        row = self._row_by_number[entry.row]
        self._append(entry.row, entry.new_blocks, 0)
        self.append_windowed(entry.row, entry.new_windowed)
        if entry.start != row.num_computed:
            self._write(self.state.num_computed, entry.row, 0, [entry.start])
        row.num_computed = entry.start + entry.num_tokens

    def _write(self, table: torch.Tensor, number: int, column: int, values: list[int]) -> None:
        self.writes.append((self.state.address(table, number, column), values))
