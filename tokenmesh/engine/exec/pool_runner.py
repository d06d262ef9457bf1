"""PoolRunner: steps of a model that pools. Nothing is drawn; rows end with their prompts."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from weakref import WeakKeyDictionary

import torch

from tokenmesh.engine.api.pooling import Pooled, PoolingParams
from tokenmesh.engine.exec.apply import apply_rows
from tokenmesh.engine.exec.compute_thread import ComputeHere, ComputeThread, Task
from tokenmesh.engine.exec.inputs import adapter_rows
from tokenmesh.engine.exec.media import step_media
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.layers.device_step import on_device
from tokenmesh.engine.layers.step import HostStep, Patch, Step
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.pooling.api import PoolModel
from tokenmesh.engine.models.pooling.heads import Kept, LabelHead, PoolHead
from tokenmesh.engine.plan import (
    NewRow,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from tokenmesh.engine.runner import NO_IMAGES
from tokenmesh.kernels.lora import LoraWeights


class PoolRunner:
    """One model, what it keeps, and the rows of its requests. Implements `Runner`.

    Only the compute thread touches rows and store.
    """

    def __init__(self, model: PoolModel, store: KvStore, rows: HostRows, *, is_async: bool) -> None:
        """is_async: launches return at once, and a separate thread carries them out."""
        self.has_own_device = False
        self.num_lanes = 1
        self.takes_drafts = False
        self.max_proposed = 0
        self.num_blocks = store.num_blocks
        self.windows = store.grouping.windows
        self.has_states = store.has_states
        self.has_pages = store.has_pages
        self.num_saved_states = 0
        self.images = NO_IMAGES
        self._model = model
        self._store = store
        store.clear_blocks(torch.zeros(1, dtype=torch.int64, device=store.device))
        self._rows = rows
        self._params: dict[int, PoolingParams] = {}
        self._types: dict[int, bytes] = {}
        """It holds the types of rows that have any."""
        self._left_out: dict[int, int] = {}
        """It holds, for rows whose embedding leaves out tokens at the beginning, how many."""
        self._kept: dict[int, Kept] = {}
        """It holds what is kept of rows whose prompt is computed in part."""
        self._heads: WeakKeyDictionary[LoraWeights, PoolHead] = WeakKeyDictionary()
        """It holds the heads of adapters that change the head."""
        self._compute = ComputeThread() if is_async else ComputeHere()

    def launch(self, plan: StepPlan) -> Task:
        return self._compute.submit(partial(self.carry_out, plan))

    def drop_model(self) -> None:
        """Let go of the weights; nothing may be launched before `take_model`."""
        del self._model

    def take_model(self, model: PoolModel) -> None:
        """The same model again, loaded anew."""
        self._model = model
        self._heads.clear()

    @torch.inference_mode()
    def carry_out(self, plan: StepPlan) -> StepResult:
        """The whole step; blocks."""
        apply_rows(plan, self._rows, self._remove, self._add)
        if not plan.scheduled:
            return StepResult()
        entries = self._sorted(plan.scheduled)
        result = StepResult()
        for entry in entries:
            error = self._rows[entry.row].error
            if error is not None:
                result.errors[entry.row] = error
        states = self._states(entries)
        for group, numbers in self._answers(entries, states):
            _put(result, group, numbers)
        return result

    def _add(self, new: NewRow) -> None:
        self._remove(new.row)
        self._rows.add(new, self._model.positions_of)
        assert new.pooling is not None, "this model does not generate"
        self._params[new.row] = new.pooling
        left_out = self._model.pooling.num_left_out(new.pooling, new.token_ids)
        if left_out:
            self._left_out[new.row] = left_out
        if new.type_ids:
            self._types[new.row] = new.type_ids
        if self.has_states:
            self._store.clear_row(new.row)

    def _remove(self, number: int) -> None:
        self._rows.remove(number)
        self._kept.pop(number, None)
        self._types.pop(number, None)
        self._left_out.pop(number, None)

    def _states(self, entries: Sequence[ScheduledRow]) -> torch.Tensor:
        ids: list[int] = []
        lengths: list[int] = []
        patches: list[Patch] = []
        for entry in entries:
            row, end = self._rows[entry.row], entry.start + entry.num_tokens
            found = (patch.within(entry.start, end, len(ids)) for patch in row.patches)
            patches += [patch for patch in found if patch is not None]
            ids += row.token_ids[entry.start : end]
            lengths += [max(row.min_length, p + 1) for p in range(entry.start, end)]
        step = HostStep(
            starts=[entry.start for entry in entries],
            counts=[entry.num_tokens for entry in entries],
            numbers=[entry.row for entry in entries],
            all_tables=self._rows.tables,
            page_size=self._store.page_size,
            token_lengths=lengths,
            windowed_tables=self._rows.windowed_tables,
            media=step_media(
                [(self._rows[each.row], each.start, each.num_tokens) for each in entries],
                self._rows.position_rows,
                patches,
            ),
            adapters=adapter_rows(entries, self._rows),
        )
        device = self._store.device
        # what keeps nothing has no block tables either
        there: Step = on_device(step, device) if self._model.keeps else step
        tokens = torch.tensor(ids).to(device)
        return self._model.states(tokens, self._types_of(entries), there, self._store)

    def _sorted(self, entries: Sequence[ScheduledRow]) -> list[ScheduledRow]:
        """Sort rows by length, then by adapter and task: in one order on all ranks."""
        numbers: dict[tuple[LoraWeights | None, PoolingParams], int] = {}

        def order(entry: ScheduledRow) -> tuple[int, int]:
            asked = self._rows[entry.row].adapter, self._params[entry.row]
            return entry.num_tokens, numbers.setdefault(asked, len(numbers))

        return sorted(entries, key=order)

    def _head_for(self, adapter: LoraWeights | None) -> PoolHead:
        """The model's, or as an adapter changes it."""
        head = self._model.head
        if adapter is None or not adapter.head:
            return head
        changed = self._heads.get(adapter)
        if changed is None:
            assert isinstance(head, LabelHead), "the reader refuses changes of other heads"
            changed = self._heads[adapter] = head.changed(adapter.head)
        return changed

    def _types_of(self, entries: Sequence[ScheduledRow]) -> torch.Tensor | None:
        if not self._types:
            return None
        given = bytearray()
        for entry in entries:
            types = self._types.get(entry.row, bytes(entry.start + entry.num_tokens))
            given += types[entry.start : entry.start + entry.num_tokens]
        found = torch.frombuffer(given, dtype=torch.uint8).to(torch.int64)
        return found.to(self._store.device)

    def _answers(
        self, entries: Sequence[ScheduledRow], states: torch.Tensor
    ) -> Iterator[tuple[list[ScheduledRow], torch.Tensor]]:
        """Rows that are answered, and the numbers [N, ...] of each such group."""
        first = 0

        def kind(
            entry: ScheduledRow,
        ) -> tuple[int, bool, PoolingParams, int, LoraWeights | None]:
            is_whole = entry.start == 0 and entry.pools
            left_out = self._left_out.get(entry.row, 0)
            adapter = self._rows[entry.row].adapter
            return entry.num_tokens, is_whole, self._params[entry.row], left_out, adapter

        for (length, is_whole, params, left_out, adapter), found in groupby(entries, kind):
            group, head = list(found), self._head_for(adapter)
            tokens = slice(first, first + length * len(group))
            first = tokens.stop
            chunk = states[tokens].view(len(group), length, -1).float()
            if is_whole:
                yield group, head.of_states(chunk[:, left_out:], params)
                continue
            assert not left_out, "such prompts are computed in one step"
            for number, entry in enumerate(group):
                kept = self._kept.setdefault(entry.row, Kept(head, params))
                kept.add(chunk[number : number + 1])
                if entry.pools:
                    yield [entry], kept.numbers()


def _put(result: StepResult, group: Sequence[ScheduledRow], numbers: torch.Tensor) -> None:
    """numbers [N, ...] of a group of rows; a row with one that is not finite fails."""
    numbers = numbers.float().cpu().contiguous()
    shape, table = list(numbers.shape[1:]), numbers.numpy()
    is_finite = bool(numbers.sum().isfinite())
    for number, entry in enumerate(group):
        if entry.row in result.errors:
            continue
        if not is_finite and not bool(numbers[number].isfinite().all()):
            result.errors[entry.row] = "its numbers are not finite"
            result.non_retryable.add(entry.row)
        else:
            result.pooled[entry.row] = Pooled(shape, table[number].tobytes())
