"""Pooler: a module tree and its head, as the runner sees them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.kernels.lora import DeviceAdapterRows
from tokenmesh.services.worker_svc.adapters.sites import AdapterSites
from tokenmesh.services.worker_svc.layers.step import Step
from tokenmesh.services.worker_svc.models.hf.facts import HfFacts
from tokenmesh.services.worker_svc.models.hf.pooling.tree import EncoderTree
from tokenmesh.services.worker_svc.models.keeps import Grouping, LayerKeeps, one_group
from tokenmesh.services.worker_svc.models.kv_store import KvStore
from tokenmesh.services.worker_svc.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.heads import PoolHead
from tokenmesh.shared.messages.media import MediaItem


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
    def sites(self) -> AdapterSites:
        return self.tree.sites

    @property
    def grouping(self) -> Grouping:
        return one_group(self.keeps)

    def positions_of(
        self, _token_ids: Sequence[int], _media: Sequence[MediaItem]
    ) -> torch.Tensor | None:
        return None

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, step: Step, _store: KvStore
    ) -> torch.Tensor:
        adapters = step.adapters
        assert not isinstance(adapters, DeviceAdapterRows), "they are refused on a GPU"
        return self.tree.states(ids, types, step.counts, adapters)
