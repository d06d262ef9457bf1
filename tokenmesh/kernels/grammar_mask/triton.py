"""grammar_mask on a GPU: writes where a bit is 0 and reads no logits."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED

BLOCK: Final = 4096
NUM_WARPS: Final = 4
TOLERANCE: Final = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}


def grammar_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    vocab = logits.shape[1]
    assert logits.stride(1) == 1
    assert masks.stride(1) == 1
    assert masks.shape == (len(rows), triton.cdiv(vocab, 32))
    if len(rows):
        grammar_mask_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
            logits,
            rows,
            masks,
            vocab,
            logits.stride(0),
            masks.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **FUSED,
        )


@triton.jit
def grammar_mask_kernel(
    logits_ptr,  # [rows, vocab]
    rows_ptr,  # [M] int32
    masks_ptr,  # [M, ceil(vocab / 32)] int32
    vocab,
    stride_logits,
    stride_masks,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Past the vocabulary everything is allowed, so that nothing is written there.
    ptrs = masks_ptr + index * stride_masks + offs // 32
    words = tl.load(ptrs, mask=offs < vocab, other=-1)
    is_forbidden = ((words >> (offs % 32)) & 1) == 0
    minus_infinity = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * stride_logits + offs, minus_infinity, mask=is_forbidden)
