"""Knows the instructions that a GPU lacks, by its compute capability."""

from typing import Final

import torch

_E4M3: Final = (8, 9)
"""The first NVIDIA GPUs that convert to and from this type."""


def e4m3_problem(device: torch.device) -> str | None:
    """Why a device cannot compute with FP8 (E4M3), with its name; None: it can, as all CPUs do."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= _E4M3:
        return None
    least, own = (".".join(map(str, each)) for each in (_E4M3, capability))
    name = torch.cuda.get_device_name(device)
    return f"FP8 (E4M3) needs a GPU of compute capability {least}, and {name} has {own}"
