"""Step: what all layers of one forward pass share."""

from dataclasses import dataclass, field

import torch

from tokenmesh.kernels.paged_attention import Prepared, Rows, prepare
from tokenmesh.services.worker_svc.layers.device_step import DeviceStep
from tokenmesh.services.worker_svc.models.native.config import QueryScaling


@dataclass(frozen=True, slots=True)
class Step:
    """Positions, slots and rows of a step. T tokens."""

    turns: list[torch.Tensor]
    """For each of DecoderConfig.ropes: [T, 1, pairs] complex64."""
    slots: torch.Tensor
    """[T, 2 * kv_heads] rows of the pool that the new keys and values go to."""
    rows: Rows
    token_rows: torch.Tensor
    """[T] int64 index into `rows` of each token."""
    positions: torch.Tensor
    """[T] int64"""
    query_scale: torch.Tensor | None
    """[T] float32 factor on queries, for models that grow them with the position."""
    _prepared: dict[int | None, Prepared] = field(default_factory=dict)

    def attention(self, window: int | None, pages: torch.Tensor) -> Prepared:
        """The work of the layers of one window over pages like `pages`; made once for them all."""
        prepared = self._prepared.get(window)
        if prepared is None:
            prepared = prepare(self.rows, pages.shape, pages.dtype, window)
            self._prepared[window] = prepared
        return prepared


AnyStep = Step | DeviceStep
"""What a layer takes: of torch's kernels on a CPU, or of a GPU's."""


def query_scale(scaling: QueryScaling | None, positions: torch.Tensor) -> torch.Tensor | None:
    """[T] float32 for positions [T]; None for a model that does not scale its queries."""
    if scaling is None:
        return None
    return 1 + scaling.beta * torch.log(1 + torch.floor(positions / scaling.period))
