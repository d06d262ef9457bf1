"""Cases of rejection: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import EXACT, Compilation, CompileLimits, Inputs, KernelCase, normal
from tokenmesh.kernels.rejection.reference import rejection_reference
from tokenmesh.kernels.rejection.triton import (
    BLOCK,
    TILE,
    judge_kernel,
    recover_kernel,
    rejection,
)


def cases() -> list[KernelCase]:
    """The borders of a block, several rows, certain drafts, no drafts at all."""
    return [
        *(_case(rows, vocab) for rows, vocab in [(1, 8191), (2, 8192), (3, 8193)]),
        _case(3, 101),
        _case(2, 8193, is_certain=True),
        _case(5, 33, is_certain=True),
        _case(0, 64),
    ]


def _case(rows: int, vocab: int, *, is_certain: bool = False) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        target = normal((rows, vocab), torch.float32, device, generator).mul_(2).softmax(-1)
        near = normal((rows, vocab), torch.float32, device, generator)
        draft = (target.log() + near).softmax(-1)
        # likely for the draft, so that it is refused now and then
        ids = (draft - target).argmax(-1) if rows else torch.empty(0, dtype=torch.int64)
        return {
            "target": target,
            "draft": None if is_certain else draft,
            "ids": ids.to(device),
            "seeds": torch.arange(rows, device=device) * 7919 - 2,
            "positions": torch.arange(rows, device=device) + 2**33,
        }

    name = f"{rows}x{vocab}{'-certain' if is_certain else ''}"
    return KernelCase(
        name=name,
        make=make,
        run=lambda a: {"out": rejection(**a)},
        reference=lambda a: {"out": rejection_reference(**a)},
        tolerance=EXACT,
    )


def compilations() -> list[Compilation]:
    """Both kernels, of a vocabulary of 152k."""
    given = {
        **{"target_ptr": "*fp32", "stride_target": "i32", "draft_ptr": "*fp32"},
        **{"stride_draft": "i32", "ids_ptr": "*i64", "seeds_ptr": "*i64"},
        **{"positions_ptr": "*i64", "score_ptr": "*fp32", "token_ptr": "*i32"},
    }
    return [
        Compilation(
            name="recover",
            kernel=recover_kernel,
            signature={**given, "vocab_size": "i32"},
            constants={"BLOCK": BLOCK, "TILE": TILE},
            divisible_by_16=("target_ptr", "stride_target", "draft_ptr", "stride_draft"),
            limits=CompileLimits(max_registers=96, max_shared_bytes=1024),
        ),
        Compilation(
            name="judge",
            kernel=judge_kernel,
            signature={**given, "out_ptr": "*i64", "num_blocks": "i32"},
            constants={"BLOCKS": 32},
            limits=CompileLimits(max_registers=64, max_shared_bytes=1024),
        ),
    ]
