"""DeviceMemory: what a device says about its memory, behind an interface that a test can script."""

from pathlib import Path
from typing import Final, Protocol

import torch

from tokenmesh.shared.errors import ConfigError

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


class DeviceMemory(Protocol):
    """One GPU. All numbers are bytes."""

    def total(self) -> int:
        """Of the device."""

    def free(self) -> int:
        """What nobody holds: neither this process, its cache of freed tensors included, nor
        another one."""

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
        """See `DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See `DeviceMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        """See `DeviceMemory.allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        """See `DeviceMemory.reserved`."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See `DeviceMemory.peak`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """See `DeviceMemory.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """See `DeviceMemory.release`."""
        torch.cuda.empty_cache()


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Host memory that can be had without swapping, within the bound of a container if there is
    one. Raises ConfigError."""
    available = _meminfo_available(meminfo)
    try:
        bound = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return available
    if not bound.isdigit():
        return available
    # pages of files that were read: the kernel drops them when the container needs memory
    cached = int(dict(zip(stat[::2], stat[1::2], strict=True)).get("inactive_file", "0"))
    return max(0, min(available, int(bound) - used + cached))


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError(f"{meminfo} does not tell how much memory is available")
