"""merge_attention on a GPU: one program a token and head."""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.merge_attention.reference import merge_attention_reference
from tokenmesh.kernels.merge_attention.tolerance import TOLERANCE
from tokenmesh.kernels.specimen import Compilation, Inputs, KernelCase, Limits, Outputs


def merge_attention(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package."""
    tokens, heads = first_lse.shape
    head_dim = first.shape[1] // heads
    assert all(x.is_contiguous() for x in (first, first_lse, second, second_lse))
    assert_aligned_rows(first, second)
    out, lse = torch.empty_like(first), torch.empty_like(first_lse)
    if out.numel():
        _merge_attention_kernel[(tokens, heads)](
            first,
            first_lse,
            second,
            second_lse,
            out,
            lse,
            D=head_dim,
            P=triton.next_power_of_2(head_dim),
            num_warps=1,
            **FUSED,
        )
    return out, lse


@triton.jit
def _merge_attention_kernel(
    first,  # [T, H, D]
    first_lse,  # [T, H]
    second,  # [T, H, D]
    second_lse,  # [T, H]
    out,  # [T, H, D]
    lse,  # [T, H]
    D: tl.constexpr,
    P: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    left = tl.load(first_lse + cell)
    right = tl.load(second_lse + cell)
    top = tl.maximum(left, right)
    shift = tl.where(top == float("-inf"), 0.0, top)
    left_weight = tl.exp(left - shift)
    right_weight = tl.exp(right - shift)
    total = tl.where(top == float("-inf"), 1.0, left_weight + right_weight)
    tl.store(lse + cell, top + tl.log(total))

    # a side without keys is not read: zero times what lies there could be NaN
    column = tl.arange(0, P)
    at = cell * D + column
    left_size = tl.where(left == float("-inf"), 0, D)
    right_size = tl.where(right == float("-inf"), 0, D)
    a = tl.load(first + at, mask=column < left_size, other=0.0).to(tl.float32)
    b = tl.load(second + at, mask=column < right_size, other=0.0).to(tl.float32)
    merged = (a * left_weight + b * right_weight) / total
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=column < D)


def specimens() -> list[KernelCase]:
    """Sides of like and unlike weight, without keys (then NaN), and nothing at all."""
    return [_specimen(*shape) for shape in [(9, 3, 64), (4, 2, 80), (1, 1, 256), (0, 2, 16)]]


def _specimen(tokens: int, heads: int, head_dim: int) -> KernelCase:
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
            kernel=_merge_attention_kernel,
            signature=types,
            constants={"D": 128, "P": 128},
            divisible_by_16=pointers,
            num_warps=1,
            limits=Limits(max_registers=64),
            required=(r"LDG\.E\.64", r"STG\.E\.64"),
        )
    ]
