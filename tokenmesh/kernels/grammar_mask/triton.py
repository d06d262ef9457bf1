"""grammar_mask on a GPU: writes where a bit is 0 and reads no logits."""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.grammar_mask import grammar_mask_reference
from tokenmesh.kernels.specimen import Compilation, Inputs, KernelCase, Limits, Outputs, normal

BLOCK: Final = 4096
NUM_WARPS: Final = 4
TOLERANCE: Final = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}


def grammar_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """See the package."""
    vocab = logits.shape[1]
    assert logits.stride(1) == 1
    assert masks.stride(1) == 1
    assert masks.shape == (len(rows), triton.cdiv(vocab, 32))
    if len(rows):
        _grammar_mask_kernel[(len(rows), triton.cdiv(vocab, BLOCK))](
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
def _grammar_mask_kernel(
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


def specimens() -> list[KernelCase]:
    """A vocabulary within a word, one over two tiles, one of whole words; no row with a grammar."""
    return [
        _specimen("less-than-a-word", 3, [2], 31),
        _specimen("two-tiles", 4, [3, 0], BLOCK + 65),
        _specimen("whole-words", 2, [1, 0], 64),
        _specimen("none", 2, [], 40),
    ]


def _specimen(name: str, num_rows: int, rows: list[int], vocab: int) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        words = torch.empty((len(rows), triton.cdiv(vocab, 32) + 1), dtype=torch.int64)
        masks = words.to(device).random_(-(1 << 31), 1 << 31, generator=generator)
        return {
            "logits": normal((num_rows, vocab + 5), dtype, device, generator)[:, :vocab],
            "rows": torch.tensor(rows, dtype=torch.int32, device=device),
            "masks": masks.to(torch.int32)[:, :-1],
        }

    def run(a: Inputs) -> Outputs:
        grammar_mask(a["logits"], a["rows"], a["masks"])
        return {"logits": a["logits"]}

    def reference(a: Inputs) -> Outputs:
        grammar_mask_reference(a["logits"], a["rows"], a["masks"])
        return {"logits": a["logits"]}

    return KernelCase(name, make, run, reference, TOLERANCE)


def compilations() -> list[Compilation]:
    """float32 logits, as the sampler has them, and bfloat16."""
    return [_compilation("fp32"), _compilation("bf16")]


def _compilation(logits: str) -> Compilation:
    return Compilation(
        name=logits,
        kernel=_grammar_mask_kernel,
        signature={
            "logits_ptr": f"*{logits}",
            "rows_ptr": "*i32",
            "masks_ptr": "*i32",
            "vocab": "i32",
            "stride_logits": "i32",
            "stride_masks": "i32",
        },
        constants={"BLOCK": BLOCK},
        divisible_by_16=("logits_ptr", "rows_ptr", "masks_ptr", "vocab", "stride_logits"),
        num_warps=NUM_WARPS,
        limits=Limits(max_registers=128),
        forbidden=("LDS",),
    )
