"""Run: the step at work, as the parts of one module tree see it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from tokenmesh.kernels.native import Program
from tokenmesh.services.worker_svc.layers.step import Step
from tokenmesh.services.worker_svc.models.keeps import KvStore

CONV: Final = "conv"
RECURRENT: Final = "recurrent"
"""The kinds of states that transformers' caches know."""


@dataclass(slots=True)
class Run:
    """One for each model; set before each forward pass. Only the compute thread uses it."""

    step: Step | None = None
    store: KvStore | None = None
    states: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """Those of the rows that a mixer computes now: (kind, index) -> [n, ...]."""
    index: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Of the indexer at work: keys [1, n, D] of its tokens -> those they are scored against."""
    cached_layers: set[int] = field(default_factory=set)
    """Layers that gave keys and values to the cache."""
    attention: dict[tuple[float, ...], Program] = field(default_factory=dict)
    """C programs of attention, one for all layers that attend alike."""

    def begin(self, step: Step, store: KvStore) -> None:
        """Before a forward pass."""
        self.step, self.store = step, store

    def end(self) -> None:
        """After it: nothing of a step outlives it here."""
        self.step = self.store = None


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """Where one module's memory is in the store."""

    run: Run
    layer: int
    item: int

    @property
    def tensor(self) -> torch.Tensor:
        """The layer's tensor, see `KvStore.layers`."""
        assert self.run.store is not None
        return self.run.store.layers[self.layer][self.item]

    @property
    def group(self) -> int:
        """The layer's KV group."""
        assert self.run.store is not None
        return self.run.store.grouping.group_of[self.layer]
