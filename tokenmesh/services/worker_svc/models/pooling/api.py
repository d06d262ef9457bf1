"""PoolModel: what a model that pools offers the runner."""

from typing import Protocol

import torch

from tokenmesh.services.worker_svc.layers.step import HostStep
from tokenmesh.services.worker_svc.models.api import ModelFacts
from tokenmesh.services.worker_svc.models.keeps import Grouping, KvStore, LayerKeeps
from tokenmesh.services.worker_svc.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.heads import PoolHead


class PoolModel(Protocol):
    """All weights of a model, ready to run. Only the compute thread calls it."""

    @property
    def facts(self) -> ModelFacts:
        """Sizes, as config.json says them."""

    @property
    def pooling(self) -> PoolingFacts: ...

    @property
    def head(self) -> PoolHead: ...

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        """What each layer keeps between steps; nothing where tokens see their whole prompt."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""

    @property
    def grouping(self) -> Grouping:
        """Which layers share a block table."""

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, step: HostStep, store: KvStore
    ) -> torch.Tensor:
        """ids and types [T] of the rows of a step -> final states [T, H].

        Rows come sorted by their number of tokens. types None: all 0.
        """
