"""Pooler: a module tree and its head, as the runner sees them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps, one_group
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.models.pooling.heads import PoolHead
from tokenmesh.engine.models.tree.facts import HfFacts
from tokenmesh.engine.models.tree.pooling.tree import EncoderTree
from tokenmesh.kernels.lora import DeviceAdapterRows


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
