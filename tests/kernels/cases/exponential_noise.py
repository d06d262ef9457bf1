"""Cases of exponential_noise: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import EXACT, Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.exponential_noise.reference import (
    TOLERANCE,
    exponential_noise_reference,
    noise_bits_reference,
)
from tokenmesh.kernels.exponential_noise.triton import (
    BLOCK,
    exponential_noise,
    exponential_noise_kernel,
    exponential_noise_of,
    noise_bits,
    noise_bits_of,
)


def cases() -> list[KernelCase]:
    """Seeds and positions at the ends of their ranges, all tokens and some, an odd size."""
    return [
        _case("bits", is_bits=True, of_ids=False),
        _case("bits-of-ids", is_bits=True, of_ids=True),
        _case("numbers", is_bits=False, of_ids=False),
        _case("numbers-of-ids", is_bits=False, of_ids=True),
    ]


def _case(name: str, is_bits: bool, of_ids: bool) -> KernelCase:
    def make(_: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        seeds = [0, 1, -5, 2**62 + 3, -(2**63)]
        ids = torch.arange(1027, device=device).repeat(len(seeds), 1)
        if of_ids:
            ids.random_(0, 2**31 - 1, generator=generator)
            ids[:, :5] = torch.tensor([0, 1, 151934, 151935, 2**31 - 1])
        return {
            "seeds": torch.tensor(seeds, device=device),
            "positions": torch.tensor([0, 1, 2, 131071, 2**40], device=device),
            "ids": ids,
        }

    def run(a: Inputs) -> Outputs:
        keys = (a["seeds"], a["positions"])
        if of_ids:
            return {"out": (noise_bits_of if is_bits else exponential_noise_of)(*keys, a["ids"])}
        op = noise_bits if is_bits else exponential_noise
        return {"out": op(*keys, a["ids"].shape[1])}

    def reference(a: Inputs) -> Outputs:
        one = noise_bits_reference if is_bits else exponential_noise_reference
        keys = zip(a["seeds"].tolist(), a["positions"].tolist(), a["ids"].tolist(), strict=True)
        rows = [[one(seed, position, each) for each in ids] for seed, position, ids in keys]
        dtype = torch.int32 if is_bits else torch.float32
        return {"out": torch.tensor(rows, dtype=dtype, device=a["ids"].device)}

    tolerance = EXACT if is_bits else {torch.float32: TOLERANCE}
    return KernelCase(name, make, run, reference, tolerance)


def compilations() -> list[Compilation]:
    """The op by itself, over a vocabulary and for some tokens."""
    types = {"seeds_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp32", "size": "i32"}
    return [
        Compilation(
            name="numbers",
            kernel=exponential_noise_kernel,
            signature=types,
            constants={"BLOCK": BLOCK, "ids_ptr": None},
            divisible_by_16=("out_ptr", "size"),
            limits=CompileLimits(max_registers=48),
            required=(r"STG\.E\.128",),
        ),
        Compilation(
            name="numbers-of-ids",
            kernel=exponential_noise_kernel,
            signature=types | {"ids_ptr": "*i32"},
            constants={"BLOCK": BLOCK},
            divisible_by_16=("ids_ptr", "out_ptr", "size"),
            limits=CompileLimits(max_registers=80),
            required=(r"LDG\.E\.128", r"STG\.E\.128"),
        ),
    ]
