"""Cases of grammar_mask: inputs, and kernels to compile ahead of time."""

import torch
import triton

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs, normal
from tokenmesh.kernels.grammar_mask import grammar_mask_reference
from tokenmesh.kernels.grammar_mask.triton import (
    BLOCK,
    NUM_WARPS,
    TOLERANCE,
    grammar_mask,
    grammar_mask_kernel,
)


def cases() -> list[KernelCase]:
    """A vocabulary within a word, one over two tiles, one of whole words; no row with a grammar."""
    return [
        _case("less-than-a-word", 3, [2], 31),
        _case("two-tiles", 4, [3, 0], BLOCK + 65),
        _case("whole-words", 2, [1, 0], 64),
        _case("none", 2, [], 40),
    ]


def _case(name: str, num_rows: int, rows: list[int], vocab: int) -> KernelCase:
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
        kernel=grammar_mask_kernel,
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
        limits=CompileLimits(max_registers=128),
        forbidden=("LDS",),
    )
