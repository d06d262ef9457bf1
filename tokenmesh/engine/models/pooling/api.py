"""PoolModel: what a model that pools offers the runner."""

from collections.abc import Sequence
from typing import Protocol

import torch

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.models.keeps import Grouping, LayerKeeps
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.models.pooling.heads import PoolHead


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
    def sites(self) -> AdapterSites:
        """Return what adapters may change."""

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        """Return what each layer keeps between steps; nothing where tokens see their whole
        prompt.
        """

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights and activations."""

    @property
    def grouping(self) -> Grouping:
        """Return which layers share a block table."""

    def states(
        self, ids: torch.Tensor, types: torch.Tensor | None, step: Step, store: KvStore
    ) -> torch.Tensor:
        """ids and types [T] of the rows of a step -> final states [T, H].

        Rows come sorted by their number of tokens. types None: all 0. Embeddings of media are in
        `step.media`.
        """

    def positions_of(
        self, token_ids: Sequence[int], media: Sequence[MediaItem]
    ) -> torch.Tensor | None:
        """Positions [position_rows, T] of a prompt with media; None: they count from 0.

        Raises ValueError for media that do not fit the prompt."""
