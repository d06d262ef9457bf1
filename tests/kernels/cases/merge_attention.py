"""Cases of merge_attention: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.merge_attention.reference import TOLERANCE, merge_attention_reference
from tokenmesh.kernels.merge_attention.triton import merge_attention, merge_attention_kernel


def cases() -> list[KernelCase]:
    """Sides of like and unlike weight, without keys (then NaN), and nothing at all."""
    return [_case(*shape) for shape in [(9, 3, 64), (4, 2, 80), (1, 1, 256), (0, 2, 16)]]


def _case(tokens: int, heads: int, head_dim: int) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def side(empty_every: int) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (tokens, heads * head_dim)
            values = torch.randn(shape, device=device, generator=generator)
            lse = torch.randn((tokens, heads), device=device, generator=generator) * 10
            values[empty_every - 1 :: empty_every] = torch.nan
            lse[empty_every - 1 :: empty_every] = -torch.inf
            return values.to(dtype), lse

        first, first_lse = side(empty_every=2)
        second, second_lse = side(empty_every=3)
        return {
            "first": first,
            "first_lse": first_lse,
            "second": second,
            "second_lse": second_lse,
        }

    def outputs(results: tuple[torch.Tensor, torch.Tensor]) -> Outputs:
        return {"out": results[0], "lse": results[1]}

    return KernelCase(
        name=f"{tokens}x{heads}x{head_dim}",
        make=make,
        run=lambda inputs: outputs(merge_attention(**inputs)),
        reference=lambda inputs: outputs(merge_attention_reference(**inputs)),
        tolerance=TOLERANCE,
    )


def compilations() -> list[Compilation]:
    """The usual head."""
    pointers = ("first", "first_lse", "second", "second_lse", "out", "lse")
    types = {name: "*fp32" if name.endswith("lse") else "*bf16" for name in pointers}
    return [
        Compilation(
            name="head-128",
            kernel=merge_attention_kernel,
            signature=types,
            constants={"D": 128, "P": 128},
            divisible_by_16=pointers,
            num_warps=1,
            limits=CompileLimits(max_registers=64),
            required=(r"LDG\.E\.64", r"STG\.E\.64"),
        )
    ]
