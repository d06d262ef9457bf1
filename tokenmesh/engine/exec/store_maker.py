"""StoreMaker: measures what the KV pool of a loaded model may take, and makes its store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenmesh.engine.exec.memory import (
    GpuBudget,
    MemoryBudget,
    Need,
    StoreSize,
    host_budget,
    need_of,
)
from tokenmesh.engine.host_memory import available_host_bytes
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps
from tokenmesh.engine.models.kv_scales import NO_SCALES, KvScales
from tokenmesh.engine.models.kv_store import KvStore, make_store
from tokenmesh.shared.config.worker import WorkerSettings


@dataclass(frozen=True, slots=True)
class StoreMaker:
    """The pool of a model, of one that generates as of one that pools."""

    keeps: Sequence[LayerKeeps]
    grouping: Grouping
    settings: WorkerSettings
    dtype: torch.dtype
    device: torch.device
    page_dtype: torch.dtype
    max_model_len: int
    can_save: bool
    """It tells whether the runner can copy states."""
    may_be_shorter: bool = False
    kv_scales: KvScales = NO_SCALES
    first_layer: int = 0
    """The first of `keeps` is of the layer with this number in the checkpoint."""
    draft_bytes: int = 0
    """A drafter keeps so many bytes of each token."""
    open_draft_bytes: int = 0
    """Rows whose drafts are verified keep so many, all together."""
    host_tier_bytes: int = 0
    """The host tier takes so much of a host's memory."""

    @property
    def need(self) -> Need:
        """The memory that blocks and rows take."""
        return need_of(
            self.keeps,
            self.grouping,
            self.settings,
            self.dtype,
            self.max_model_len,
            can_save=self.can_save,
            may_be_shorter=self.may_be_shorter,
            page_dtype=self.page_dtype,
            draft_bytes=self.draft_bytes,
            open_draft_bytes=self.open_draft_bytes,
        )

    def budget(
        self, gpu: GpuBudget | None, profile: Callable[[], int], sharers: int = 1
    ) -> MemoryBudget:
        """Memory that is left once the weights are there.

        gpu: None on a CPU, whose memory the ranks of a host share. profile: see `GpuBudget`.
        """
        if gpu is not None:
            return gpu.measure(profile)
        available = available_host_bytes() - self.host_tier_bytes
        return host_budget(max(0, available) // sharers, self.settings.cpu_memory_utilization)

    def make(self, size: StoreSize) -> KvStore:
        """Make a store of that size."""
        return make_store(
            self.keeps,
            size.num_blocks,
            self.settings.block_size,
            self.settings.num_rows,
            self.dtype,
            self.device,
            self.grouping,
            size.num_saved,
            self.page_dtype,
            self.kv_scales.of(len(self.keeps), self.first_layer),
        )
