"""Forms of the tests of a Triton op: cases to run and kernels to compile ahead of time.

Every `tokenmesh/kernels/<op>/triton.py` has a `tests/kernels/cases/<op>.py` with `cases()` and
`compilations()`. The same case runs in Triton's interpreter and, in bfloat16, on a GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

Inputs = dict[str, Any]
"""Tensors, numbers and None by argument name; tensors may be views of one storage."""
Outputs = dict[str, torch.Tensor]
Make = Callable[[torch.dtype, torch.device, torch.Generator], Inputs]
"""Inputs on a device, from that device's generator; equal seeds give equal inputs."""

EXACT: Final[Mapping[torch.dtype, float]] = {torch.float32: 0.0}
"""The tolerance of ops that only move numbers."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One case of an op."""

    name: str
    make: Make
    run: Callable[[Inputs], Outputs]
    """Calls the Triton launcher. An input that it writes is an output of the same name; every
    other input must stay as it is."""
    reference: Callable[[Inputs], Outputs]
    """Calls the specification, in plain torch; gets inputs of its own, which it may change."""
    tolerance: Mapping[torch.dtype, float]
    """Absolute and relative, for each dtype that `make` may be asked for. Integers are exact."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Bounds of a compiled kernel."""

    max_registers: int
    """Registers of one thread; 65,536 of them serve all threads of an SM."""
    max_shared_bytes: int = 0
    """Shared memory of one program."""
    max_spills: int = 0
    """Loads from and stores to local memory."""
    oldest_triton: tuple[int, int] = (3, 6)
    """Older ones compile the kernel without keeping the limits."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """One ahead-of-time compilation for sm_90, as the launcher's arguments would specialize it."""

    name: str
    kernel: Any
    """The function that `triton.jit` made."""
    signature: Mapping[str, str]
    """Triton's type of every argument that is not constexpr: "*bf16", "i32", "fp32"."""
    constants: Mapping[str, Any]
    """The value of every constexpr argument."""
    limits: CompileLimits
    divisible_by_16: tuple[str, ...] = ()
    """Arguments the launch finds divisible by 16: aligned pointers and padded strides."""
    num_warps: int = 4
    num_stages: int = 3
    required: tuple[str, ...] = ()
    """Regular expressions; each must match an instruction: "LDGSTS|UTMALDG", "HGMMA"."""
    forbidden: tuple[str, ...] = ()
    """Regular expressions that must match none."""


def normal(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    """Standard normal numbers, drawn in float32: about the same in every dtype."""
    return torch.randn(shape, device=device, generator=generator).to(dtype)
