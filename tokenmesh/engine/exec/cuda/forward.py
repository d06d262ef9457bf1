"""Forward: from the rows' state on the device to logits; nothing here waits for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self, get_args

import torch

from tokenmesh.engine.exec.cuda.batch import Batch, DevicePromptSpan
from tokenmesh.engine.exec.cuda.step_buffer import StepBuffer
from tokenmesh.engine.layers.device_step import DeviceStep, GroupTables
from tokenmesh.engine.layers.step import NO_MEDIA
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.keeps import Pages
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.sampling.device_sampler import DeviceSampler, Needs
from tokenmesh.engine.sampling.logprobs import POSITIONS_AT_ONCE
from tokenmesh.kernels.logprobs import Logprobs, logprobs
from tokenmesh.kernels.paged_attention import DeviceRows, choose_splits
from tokenmesh.kernels.post_update import post_update
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.kernels.step_inputs import RowState, StepTensors, step_inputs


@dataclass(slots=True)
class Forward:
    """A model and the memory it runs on, all of which stays where it is."""

    model: LanguageModel
    store: KvStore
    state: RowState
    buffer: StepBuffer
    """The device's."""
    tensors: Sequence[StepTensors]
    """These are the tensors of each KV group, for the largest step."""
    iota: torch.Tensor
    """int32: 0, 1, 2, ..., as many as the largest step has tokens or rows, and one more."""

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[T, hidden] of any batch; keys and values are in their pages."""
        num_tokens, num_rows = batch.num_tokens, len(batch.entries)
        splits = choose_splits(batch.num_short, self._kv_heads, batch.longest_short)
        step = self._step(
            num_tokens,
            self.buffer.query_starts[: num_rows + 1],
            batch.num_short,
            splits,
            [entry.start for entry in batch.entries],
            [entry.num_tokens for entry in batch.entries],
        )
        if batch.adapter_rows is not None:
            step = replace(step, adapters=batch.adapter_rows)
        if batch.media is not NO_MEDIA:
            step = step.with_media(batch.media)
        hidden = self.model.embed(self.tensors[0].token_ids[:num_tokens], batch.patches)
        return self.model.forward(hidden, step, self.store)

    def decode_logits(self, size: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [size, V] of a batch of one token a row, of any lengths, padded to `size`.

        They are in `out` when it is given.
        """
        splits = choose_splits(size, self._kv_heads, self.state.token_ids.shape[1])
        step = self._step(size, self.iota[: size + 1], size, splits)
        hidden = self.model.embed(self.tensors[0].token_ids[:size])
        return self.model.logits(self.model.forward(hidden, step, self.store), out)

    def prompt_logprobs(self, hidden: torch.Tensor, span: DevicePromptSpan) -> list[Logprobs]:
        """A few positions at a time, so that logits stay small."""
        pieces = []
        for first in range(0, len(span.targets), POSITIONS_AT_ONCE):
            count = min(POSITIONS_AT_ONCE, len(span.targets) - first)
            start = span.tokens.start + first
            logits = self.model.logits(hidden[start : start + count])
            begin = span.first + first
            targets = self.state.token_ids[span.row, begin : begin + count].long()
            num_top = min(span.count, logits.shape[1])
            pieces.append(logprobs(logits, self.iota[:count], targets, num_top))
        return pieces

    def _step(
        self,
        num_tokens: int,
        cu_q: torch.Tensor,
        num_short: int,
        num_splits: int,
        starts: Sequence[int] = (),
        counts: Sequence[int] = (),
    ) -> DeviceStep:
        """starts and counts: the host's numbers of each row; none in a step that is recorded."""
        num_rows = len(cu_q) - 1
        first, *windowed = [
            self._fill(group, num_tokens, cu_q) for group in range(len(self.tensors))
        ]
        rows = DeviceRows(
            cu_q=cu_q,
            seq_lens=first.seq_lens,
            block_tables=first.tables,
            num_short=num_short,
            max_short_query=1,
            num_long_tokens=num_tokens - num_short,
            num_splits=num_splits,
        )
        states = None
        if self.store.has_states:
            states = StateRows(
                # padding points at the last slot, which belongs to no row
                self.buffer.rows[:num_rows].masked_fill(
                    self.buffer.rows[:num_rows] < 0, self.store.scratch_row
                ),
                cu_q,
                first.seq_lens - cu_q.diff(),
                max(counts, default=1),
            )
        return DeviceStep(
            first.positions,
            first.lengths,
            first.slots,
            rows,
            [GroupTables(each.slots, each.tables) for each in windowed],
            states,
            starts,
            counts,
        )

    def _fill(self, group: int, num_tokens: int, cu_q: torch.Tensor) -> StepTensors:
        """Return what a KV group's layers read of the step."""
        all_of_it, num_rows = self.tensors[group], len(cu_q) - 1
        out = StepTensors(
            all_of_it.token_ids[:num_tokens],
            all_of_it.positions[:num_tokens],
            all_of_it.lengths[:num_tokens],
            all_of_it.slots[:num_tokens],
            all_of_it.seq_lens[:num_rows],
            all_of_it.tables[:num_rows],
        )
        state = self.state.of_group(group)
        step_inputs(self.buffer.rows[:num_rows], cu_q, state, self.store.page_size, out)
        return out

    @property
    def _kv_heads(self) -> int:
        """The most of any layer, by which long contexts are split."""
        kept = (each for layer in self.store.keeps for each in layer)
        return max((each.kv_heads for each in kept if isinstance(each, Pages)), default=1)


Kind = Literal["whole", "filtered", "split"]
"""whole: preparation, forward, sampler and update, for rows without filters; filtered: the same
for all; split: preparation and forward, when the host has a word in what follows."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    forward: Forward
    sampler: DeviceSampler
    logits: torch.Tensor
    """float32 [rows, V]: shared by all split steps, which a graph's own memory is not."""

    @classmethod
    def make(cls, forward: Forward, sampler: DeviceSampler, num_rows: int) -> Self:
        """For batches of up to `num_rows`."""
        shape = (num_rows, forward.model.facts.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=forward.store.device)
        return cls(forward, sampler, logits)

    def of(self, kind: Kind, size: int) -> Callable[[], torch.Tensor]:
        """For a batch of `size` rows. Returns what was drawn, int64 [2, size], or the logits."""
        if kind == "split":
            return partial(self.forward.decode_logits, size, self.logits[:size])
        needs = Needs(has_filters=kind == "filtered")
        forward, sampler = self.forward, self.sampler
        rows, positions = forward.buffer.rows[:size], forward.buffer.positions[:size]
        starts, draws = forward.iota[: size + 1], forward.iota[:size]

        def whole_step() -> torch.Tensor:
            logits = forward.decode_logits(size)
            drawn = sampler.draw(needs, rows, logits, positions)
            post_update(rows, starts, draws, drawn.tokens, forward.state)
            return drawn.drawn

        return whole_step
