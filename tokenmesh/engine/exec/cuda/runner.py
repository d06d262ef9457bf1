"""CudaRunner: a step is a copy, launches and a copy; its tokens are read one step later.

Start at `CudaRunner.launch`. Everything is queued on one stream by the engine thread, which waits
for nothing but the event at a step's end.
"""

from collections.abc import Sequence
from functools import partial

import torch

from tokenmesh.engine.exec.apply import apply_rows
from tokenmesh.engine.exec.compute_thread import Skipped
from tokenmesh.engine.exec.cuda.adapters import AdapterSlots
from tokenmesh.engine.exec.cuda.answer import Answer
from tokenmesh.engine.exec.cuda.batch import Batch, make_batch
from tokenmesh.engine.exec.cuda.device import Device
from tokenmesh.engine.exec.cuda.forward import DecodeSteps, Forward, Kind
from tokenmesh.engine.exec.cuda.graphs import (
    Graphs,
    Progress,
    capture,
    graph_sizes,
    silent,
)
from tokenmesh.engine.exec.cuda.launch import CudaLaunch
from tokenmesh.engine.exec.cuda.rows import CudaLimits, CudaRows
from tokenmesh.engine.exec.cuda.step_buffer import (
    WRITE_WORDS,
    Slot,
    Staging,
    StepBuffer,
    apply_writes,
    pack_writes,
)
from tokenmesh.engine.exec.placeholders import within_vocabulary
from tokenmesh.engine.layers.upload import upload
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import NewRow, StepPlan, StepResult
from tokenmesh.engine.runner import NO_IMAGES
from tokenmesh.engine.sampling.device_sampler import (
    DeviceDraws,
    DeviceSampler,
    Needs,
)
from tokenmesh.kernels.lora import DeviceAdapterRows
from tokenmesh.kernels.post_update import post_update
from tokenmesh.kernels.step_inputs import RowState, StepTensors


class CudaRunner:
    """One model, what it keeps, and the rows of its requests, on a device. Implements `Runner`."""

    def __init__(
        self,
        model: LanguageModel,
        store: KvStore,
        sampler: DeviceSampler,
        device: Device,
        limits: CudaLimits,
    ) -> None:
        self.has_own_device = True
        self.num_lanes = 1
        self.takes_drafts = False
        self.max_proposed = 0
        self.num_blocks = store.num_blocks
        self.windows = store.grouping.windows
        self.has_states = store.has_states
        self.has_pages = store.has_pages
        # nothing copies states on a device yet, so the prefix cache is off where there are any
        self.num_saved_states = 0
        self.images = NO_IMAGES
        store.clear_blocks(torch.zeros(1, dtype=torch.int64, device=store.device))
        self._device = device
        self._limits = limits
        self._sampler = sampler
        self._forward = _make_forward(model, store, device.device, limits)
        self._nothing = torch.zeros(1, dtype=torch.int64, device=device.device)
        self._rows = CudaRows(self._forward.state, model.facts, len(self.windows))
        self._adapters = _slots_of(model, store, limits)
        self._staging = Staging(device, limits.max_num_seqs, limits.steps_in_flight)
        self._graphs = Graphs()
        self._last: CudaLaunch | None = None

    def launch(self, plan: StepPlan) -> CudaLaunch:
        below = self._last if self._last is not None and not self._last.is_taken else None
        try:
            if below is not None and below.has_failed:
                raise Skipped("a step below failed")
            self._last = self._launch(plan, below)
        # raised where the result is taken
        except Exception as error:
            self._last = CudaLaunch(below, None, partial(_raise, error))
        return self._last

    def carry_out(self, plan: StepPlan) -> StepResult:
        """The whole step; blocks."""
        return self.launch(plan).result()

    @property
    def graph_sizes(self) -> list[int]:
        """Those that `make_graphs` records, ascending; none for a model that takes no graphs."""
        if not self._forward.model.takes_graphs:
            return []
        return graph_sizes(self._limits.max_num_seqs, self._limits.largest_graph)

    @torch.inference_mode()
    def make_graphs(self, sizes: Sequence[int], progress: Progress = silent) -> int:
        """Record decode steps; again whenever weights or pool have moved. How many there are."""
        steps = DecodeSteps.make(self._forward, self._sampler, max(sizes, default=0))
        self._graphs = capture(self._device, steps, sizes, progress)
        return len(self._graphs.by_kind)

    def drop_graphs(self) -> None:
        """Decode without them, and give their memory back."""
        self._graphs = Graphs()

    def drop_model(self) -> None:
        """Let go of the weights; nothing may be launched before `take_model`."""
        self.drop_graphs()
        del self._forward.model

    def take_model(self, model: LanguageModel) -> None:
        """The same model again, loaded anew."""
        self._forward.model = model

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, below: CudaLaunch | None) -> CudaLaunch:
        batch = self._prepare(plan)
        slot = self._staging.take()
        try:
            size = self._size_for(batch)
            self._send(slot, batch, size)
            answer = self._compute(batch, size, below)
            host = self._staging.download(slot, answer.packed())
        except Exception:
            self._staging.renew(slot)
            raise
        return CudaLaunch(below, slot.event, partial(self._read, slot, answer, host, batch))

    def _prepare(self, plan: StepPlan) -> Batch:
        """Apply the plan's row changes on the host."""
        assert not plan.has_drafts, "it takes none"
        rows = self._rows
        rows.begin()
        apply_rows(plan, rows, self._remove, self._add)
        self._sampler.apply()
        return make_batch(rows.advance(plan.decodes) + plan.scheduled, rows)

    def _remove(self, number: int) -> None:
        self._rows.remove(number)
        self._sampler.remove(number)

    def _add(self, given: NewRow) -> None:
        new = within_vocabulary(given, self._forward.model.facts.vocab_size)
        self._rows.add(new, self._forward.model.positions_of)
        self._sampler.add(new)

    def _size_for(self, batch: Batch) -> int | None:
        """The graphs that a batch may use; None: it is computed eagerly."""
        return self._graphs.size_for(len(batch.entries)) if batch.is_plain_decode else None

    def _send(self, slot: Slot, batch: Batch, size: int | None) -> None:
        """One copy; then what changed in the rows goes to its place."""
        batch.write(slot.upload, size or len(batch.entries))
        writes, buffer = self._rows.writes, self._forward.buffer
        packed = pack_writes(writes)
        fits = len(packed) <= WRITE_WORDS
        if fits:
            slot.upload.writes[: len(packed)] = packed
        used = len(packed) if fits else 0
        buffer.used(used).copy_(slot.upload.used(used), non_blocking=True)
        if writes:
            there = buffer.writes[: len(packed)] if fits else upload(packed, buffer.flat.device)
            apply_writes(self._forward.state.flat, there, len(writes))

    def _compute(self, batch: Batch, size: int | None, below: CudaLaunch | None) -> Answer:
        needs = self._sampler.needs(batch.sampled)
        if not batch.entries:
            return Answer(None, [])
        if size is None:
            batch.adapter_rows = self._adapter_rows(batch)
            hidden = self._forward.hidden(batch)
            prompts = [(s, self._forward.prompt_logprobs(hidden, s)) for s in batch.spans]
            return Answer(self._draw(batch, needs, hidden, below), prompts)
        if needs.is_fixed:
            kind: Kind = "filtered" if needs.has_filters else "whole"
            return Answer(DeviceDraws(self._graphs.replay(kind, size), None, needs), [])
        logits = self._graphs.replay("split", size)
        return Answer(self._draw_from(batch, needs, logits[: len(batch.entries)], below), [])

    def _adapter_rows(self, batch: Batch) -> DeviceAdapterRows | None:
        if self._adapters is None or not batch.adapters:
            return None
        counts = (entry.num_tokens for entry in batch.entries)
        spans = list(zip(batch.adapters, counts, strict=True))
        return self._adapters.rows(spans, self._rows.adapters)

    def _draw(
        self, batch: Batch, needs: Needs, hidden: torch.Tensor, below: CudaLaunch | None
    ) -> DeviceDraws | None:
        """From hidden states; also counts what the rows without a draw have computed."""
        if not batch.sampled:
            self._update(batch, self._nothing)
            return None
        last = self._forward.buffer.last_tokens[: len(batch.sampled)]
        logits = self._forward.model.logits(hidden.index_select(0, last))
        return self._draw_from(batch, needs, logits, below)

    def _draw_from(
        self, batch: Batch, needs: Needs, logits: torch.Tensor, below: CudaLaunch | None
    ) -> DeviceDraws:
        if needs.grammars is not None and below is not None:
            # what may come next depends on its tokens; the forward pass goes on meanwhile
            below.result()
        buffer, num_sampled = self._forward.buffer, len(batch.sampled)
        draws = self._sampler.draw(
            needs, buffer.sampled_rows[:num_sampled], logits, buffer.positions[:num_sampled]
        )
        self._update(batch, draws.tokens)
        return draws

    def _update(self, batch: Batch, tokens: torch.Tensor) -> None:
        buffer, num_rows = self._forward.buffer, len(batch.entries)
        starts = buffer.query_starts[: num_rows + 1]
        post_update(
            buffer.rows[:num_rows], starts, buffer.draws[:num_rows], tokens, self._forward.state
        )

    def _read(self, slot: Slot, answer: Answer, host: torch.Tensor, batch: Batch) -> StepResult:
        try:
            result = answer.read(host, batch)
            if answer.draws is not None and answer.draws.needs.grammars is not None:
                answer.draws.needs.grammars.note(result)
            return result
        finally:
            self._staging.give_back(slot)


def _raise(error: Exception) -> StepResult:
    raise error


def _slots_of(model: LanguageModel, store: KvStore, limits: CudaLimits) -> AdapterSlots | None:
    if not limits.max_loras:
        return None
    return AdapterSlots(
        model.sites, limits.max_loras, limits.max_lora_rank, model.dtype, store.device
    )


def _make_forward(
    model: LanguageModel, store: KvStore, device: torch.device, limits: CudaLimits
) -> Forward:
    """With all the memory that the largest step needs."""
    num_rows, max_blocks = limits.max_num_seqs, -(-limits.max_model_len // store.page_size)
    num_groups = len(store.grouping.windows)
    words = torch.zeros(StepBuffer.num_words(num_rows), dtype=torch.int32, device=device)
    most = max(limits.max_tokens, num_rows)
    return Forward(
        model=model,
        store=store,
        state=RowState.zeros(num_rows, limits.max_model_len, max_blocks, device, num_groups),
        buffer=StepBuffer.of(words, num_rows),
        tensors=[StepTensors.zeros(most, num_rows, max_blocks, device) for _ in range(num_groups)],
        iota=torch.arange(most + 1, dtype=torch.int32, device=device),
    )
