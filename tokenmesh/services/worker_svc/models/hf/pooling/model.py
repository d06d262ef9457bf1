"""Pooler: a module tree and its head, as the runner sees them."""

from dataclasses import dataclass

import torch

from tokenmesh.services.worker_svc.layers.step import HostStep
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.pooling.tree import EncoderTree
from tokenmesh.services.worker_svc.models.keeps import Grouping, KvStore, LayerKeeps, one_group
from tokenmesh.services.worker_svc.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.heads import PoolHead


@dataclass(slots=True)
class Pooler:
    """Implements `models.api.PoolModel`, of tokens that see their whole prompt."""

    facts: HfFacts
    pooling: PoolingFacts
    tree: EncoderTree
    head: PoolHead
    keeps: tuple[LayerKeeps, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.tree.model.dtype
        return dtype

    @property
    def grouping(self) -> Grouping:
        return one_group(self.keeps)

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, step: HostStep, _store: KvStore
    ) -> torch.Tensor:
        return self.tree.states(ids, types, step.counts)
