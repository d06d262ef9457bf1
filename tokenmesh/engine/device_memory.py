"""Tell how much memory a GPU has."""

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """One GPU. All numbers are bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """Return what is free: held by neither this process, its cache of freed tensors included,
        nor another one."""

    def allocated(self) -> int:
        """Tensors of this process."""

    def reserved(self) -> int:
        """Tensors of this process and what its allocator keeps for later ones."""

    def peak(self) -> int:
        """Most that was allocated at a time since `reset_peak`."""

    def reset_peak(self) -> None:
        """Measure the peak from now on."""

    def release(self) -> None:
        """Give back what the allocator keeps for later."""


class CudaMemory:
    """`DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        torch.cuda.empty_cache()
