"""Devices a model may be divided over: their memory, and speeds that a cost model counts with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tokenmesh.shared.errors import ConfigError

_GIB: Final = 1 << 30
_GIVEN: Final = re.compile(r"(?:(\d+)x)?(.+)", re.IGNORECASE)
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:GiB|GB|G)?", re.IGNORECASE)
MAX_DEVICES: Final = 4096


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One device. Speeds are what its maker states; the cost model takes a share of them."""

    name: str
    num_bytes: int
    """Memory, as its driver reports it."""
    gb_per_s: float
    """It is the bandwidth of its memory."""
    tflops: float
    """Dense products in bfloat16."""
    link_gb_per_s: float
    """To another device of the same host, in one direction."""
    sum_s: float
    """A sum of one token's numbers over two devices."""
    is_gpu: bool = True


def _gpu(name: str, mib: int, gb_per_s: float, tflops: float, link: float) -> PlannedDevice:
    # a small sum takes as long as its launches: NVLink, or PCIe through the host
    return PlannedDevice(name, mib << 20, gb_per_s, tflops, link, 15e-6 if link > 100 else 40e-6)


GPUS: Final[Mapping[str, PlannedDevice]] = {
    device.name: device
    for device in (
        _gpu("B200", 183359, 8000, 2250, 900),
        _gpu("H200", 143771, 4800, 989, 450),
        _gpu("H100", 81559, 3350, 989, 450),
        _gpu("A100", 81920, 2039, 312, 300),
        _gpu("A100-40", 40960, 1555, 312, 300),
        _gpu("L40S", 46068, 864, 362, 32),
        _gpu("L4", 23034, 300, 121, 16),
        _gpu("A10", 23028, 600, 125, 16),
        _gpu("RTX4090", 24564, 1008, 165, 16),
        _gpu("T4", 15360, 320, 65, 16),
    )
}
"""By the names that `--gpus` takes. The numbers are from data sheets."""

_CPU: Final = PlannedDevice("CPU", 0, 100.0, 2.0, 10.0, 4e-4, is_gpu=False)
"""A socket with eight channels of memory; a sum is one of gloo over loopback."""


def parse_gpus(
    text: str, gb_per_s: float | None, tflops: float | None
) -> tuple[int, PlannedDevice]:
    """`8xH100`, or `4x48GiB` with both speeds, as number and device. Raises ConfigError."""
    count, what = _parts(text, "--gpus")
    device = GPUS.get(what.upper())
    if device is None:
        size = _SIZE.fullmatch(what)
        if size is None:
            known = ", ".join(GPUS)
            problem = f"--gpus {text}: {what} is unknown; known are {known}, and sizes like 48GiB"
            raise ConfigError(problem, param="--gpus")
        if gb_per_s is None or tflops is None:
            problem = f"--gpus {text}: a device by its size needs --bandwidth and --tflops as well"
            raise ConfigError(problem, param="--gpus")
        device = _gpu(what, int(float(size[1]) * 1024), gb_per_s, tflops, 16)
    return count, _with_speeds(device, gb_per_s, tflops)


def parse_cpus(
    text: str, gb_per_s: float | None, tflops: float | None
) -> tuple[int, PlannedDevice]:
    """`2x64GiB`: two hosts or NUMA nodes, each with so much free memory. Raises ConfigError."""
    count, what = _parts(text, "--cpus")
    size = _SIZE.fullmatch(what)
    if size is None or not float(size[1]):
        problem = f"--cpus {text}: give the free memory of each, such as 2x64GiB"
        raise ConfigError(problem, param="--cpus")
    device = replace(_CPU, num_bytes=int(float(size[1]) * _GIB))
    return count, _with_speeds(device, gb_per_s, tflops)


def _parts(text: str, flag: str) -> tuple[int, str]:
    found = _GIVEN.fullmatch(text.strip())
    count = int(found[1] or 1) if found else 0
    if found is None or not 1 <= count <= MAX_DEVICES:
        problem = f"{flag} {text}: give a number and a device, at most {MAX_DEVICES} of them"
        raise ConfigError(problem, param=flag)
    return count, found[2].strip()


def _with_speeds(
    device: PlannedDevice, gb_per_s: float | None, tflops: float | None
) -> PlannedDevice:
    return replace(
        device,
        gb_per_s=device.gb_per_s if gb_per_s is None else gb_per_s,
        tflops=device.tflops if tflops is None else tflops,
    )
