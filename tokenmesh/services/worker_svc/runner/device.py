"""Where a worker computes, and what the device says about its memory."""

import logging
from pathlib import Path
from typing import Final, Protocol

import torch

from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_DRIVER: Final = Path("/dev/nvidiactl")
"""Where there is one, there is an NVIDIA driver with a GPU to drive."""
_OLDEST: Final = (8, 0)
"""Compute capability of the first GPUs with bfloat16: Ampere."""


def device_of(settings: WorkerSettings, driver: Path = _DRIVER) -> torch.device:
    """What the settings say. Raises ConfigError for a GPU that is not there or not to be used."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return _gpu()
    reason = (
        f"torch {torch.__version__} is built without CUDA"
        if torch.version.cuda is None
        else f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no driver that is new "
        "enough, or CUDA_VISIBLE_DEVICES hides all GPUs"
    )
    if settings.device == "cuda":
        raise ConfigError(f"device is cuda and torch finds no GPU: {reason}", param="worker.device")
    if driver.exists():
        logger.warning("there is an NVIDIA driver, but the model runs on the CPU: %s", reason)
    return torch.device("cpu")


def _gpu() -> torch.device:
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    # held exclusively by another process, or a driver and libraries that do not match
    except RuntimeError as error:
        raise ConfigError(f"the GPU cannot be used: {error}", param="worker.device") from error
    if torch.version.hip is not None or capability < _OLDEST:
        raise ConfigError(
            f"{name} cannot run the kernels, which are for NVIDIA GPUs of compute capability "
            f"{_OLDEST[0]}.{_OLDEST[1]} and above; set worker.device to cpu",
            param="worker.device",
        )
    logger.info("the model runs on %s", name)
    return device


_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


class DeviceMemory(Protocol):
    """One GPU. All numbers are bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """What is free: held by neither this process, its cache of freed tensors included, nor
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
    raise ConfigError(f"{meminfo} does not state how much memory is available")
