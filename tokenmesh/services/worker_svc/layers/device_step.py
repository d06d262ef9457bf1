"""DeviceStep: what all layers of one forward pass share on a GPU. Nothing of it is read back."""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.paged_attention import DeviceRows


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The twin of `Step`, from tensors that were written on the device. T tokens."""

    turns: list[torch.Tensor]
    """For each of DecoderConfig.ropes: [T, 1, pairs] complex64."""
    slots: torch.Tensor
    """[T] int64, see kv_write."""
    rows: DeviceRows
    query_scale: torch.Tensor | None
    """[T] float32 factor on queries, for models that grow them with the position."""

    def attention(self, window: int | None, _pages: torch.Tensor) -> DeviceRows:
        """The rows as layers of one window see them."""
        return self.rows.for_window(window)
