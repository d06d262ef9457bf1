"""DeviceStep: a step on a GPU. Nothing of it is read back."""

from dataclasses import dataclass

import torch

from tokenmesh.kernels.paged_attention import DeviceRows


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """See `Step`; from tensors that were written on the device. T tokens."""

    positions: torch.Tensor
    """[T] int64"""
    lengths: torch.Tensor
    """[T] int64"""
    token_slots: torch.Tensor
    """[T] int64, see kv_write."""
    rows: DeviceRows

    def slots(self, _pages: torch.Tensor, group: int = 0) -> torch.Tensor:
        """Alike for pages of any shape; there is one group."""
        assert not group
        return self.token_slots

    def attention(self, window: int | None, _pages: torch.Tensor, group: int = 0) -> DeviceRows:
        """The rows as layers of one window see them."""
        assert not group
        return self.rows.for_window(window)
