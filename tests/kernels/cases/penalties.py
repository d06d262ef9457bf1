"""Cases of penalties: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import (
    EXACT,
    Compilation,
    CompileLimits,
    Inputs,
    KernelCase,
    Outputs,
)
from tokenmesh.kernels.penalties.reference import count_tokens_reference, penalties_reference
from tokenmesh.kernels.penalties.rows import PenaltyRows
from tokenmesh.kernels.penalties.triton import (
    BLOCK,
    ROWS,
    count_tokens,
    count_tokens_kernel,
    penalties,
    penalties_kernel,
)


def cases() -> list[KernelCase]:
    """Rows with and without a slot, padding, an odd vocabulary in two blocks, a flaw."""
    return [
        KernelCase("penalties", _make, _run, _reference, EXACT),
        KernelCase("count", _make, _run_count, _reference_count, EXACT),
    ]


def _make(_: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    vocab_size = 1029
    counts = torch.randint(-6, 4, (3, vocab_size), generator=generator, device=device).clamp_(min=0)
    return {
        "logits": torch.randn(5, vocab_size + 3, generator=generator, device=device)[:, :vocab_size]
        * 4,
        "idx_mapping": torch.tensor([4, 0, -1, 2, 1], dtype=torch.int32, device=device),
        "slot": torch.tensor([2, -1, 0, -1, 1], dtype=torch.int32, device=device),
        "repetition": torch.tensor([1.0, 1.3, 0.7], device=device),
        "presence": torch.tensor([0.3, 0.0, -1.1], device=device),
        "frequency": torch.tensor([0.7, -0.2, 0.0], device=device),
        "prompt": torch.randint(-(2**31), 2**31, (3, 33), generator=generator, device=device).int(),
        "counts": counts.int(),
        "tokens": torch.tensor([0, vocab_size - 1, 5, 7, 9], device=device),
        "flaws": torch.tensor([0, 0, 0, 1, 0], device=device),
    }


def _rows_of(a: Inputs) -> PenaltyRows:
    names = ("slot", "repetition", "presence", "frequency", "prompt", "counts")
    return PenaltyRows(*(a[name] for name in names))


def _run(a: Inputs) -> Outputs:
    penalties(a["logits"], a["idx_mapping"], _rows_of(a))
    return {"logits": a["logits"]}


def _reference(a: Inputs) -> Outputs:
    penalties_reference(a["logits"], a["idx_mapping"], _rows_of(a))
    return {"logits": a["logits"]}


def _run_count(a: Inputs) -> Outputs:
    count_tokens(a["tokens"], a["flaws"], a["idx_mapping"], _rows_of(a))
    return {"counts": a["counts"]}


def _reference_count(a: Inputs) -> Outputs:
    count_tokens_reference(a["tokens"], a["flaws"], a["idx_mapping"], _rows_of(a))
    return {"counts": a["counts"]}


def compilations() -> list[Compilation]:
    """A vocabulary of 152k."""
    signature = {
        "logits_ptr": "*fp32",
        "stride_n": "i32",
        "idx_mapping_ptr": "*i32",
        "slot_ptr": "*i32",
        "repetition_ptr": "*fp32",
        "presence_ptr": "*fp32",
        "frequency_ptr": "*fp32",
        "prompt_ptr": "*i32",
        "counts_ptr": "*i32",
        "vocab_size": "i32",
        "num_mask_words": "i32",
    }
    count_signature = {
        "tokens_ptr": "*i64",
        "flaws_ptr": "*i64",
        "idx_mapping_ptr": "*i32",
        "slot_ptr": "*i32",
        "counts_ptr": "*i32",
        "num_rows": "i32",
        "vocab_size": "i32",
    }
    return [
        Compilation(
            name="penalties",
            kernel=penalties_kernel,
            signature=signature,
            constants={"BLOCK": BLOCK},
            divisible_by_16=("logits_ptr", "stride_n", "counts_ptr", "vocab_size"),
            limits=CompileLimits(max_registers=64),
            required=(r"LDG\.E\.128", r"STG\.E"),
        ),
        Compilation(
            name="count",
            kernel=count_tokens_kernel,
            signature=count_signature,
            constants={"ROWS": ROWS},
            limits=CompileLimits(max_registers=40),
        ),
    ]
