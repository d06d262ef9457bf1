"""merge_attention on a GPU: one program a token and head."""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED


def merge_attention(
    first: torch.Tensor,
    first_lse: torch.Tensor,
    second: torch.Tensor,
    second_lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = first_lse.shape
    head_dim = first.shape[1] // heads
    assert all(x.is_contiguous() for x in (first, first_lse, second, second_lse))
    assert_aligned_rows(first, second)
    out, lse = torch.empty_like(first), torch.empty_like(first_lse)
    if out.numel():
        merge_attention_kernel[(tokens, heads)](
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
def merge_attention_kernel(
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
