"""Cases of logit_bias: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import EXACT, Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.logit_bias.reference import logit_bias_reference, record_reference
from tokenmesh.kernels.logit_bias.rows import LimitRows
from tokenmesh.kernels.logit_bias.triton import (
    BLOCK,
    EDITS,
    LEAST_RECENT,
    logit_bias,
    logit_bias_kernel,
    record,
    record_kernel,
)

_NAMES = tuple(LimitRows.__dataclass_fields__)


def cases() -> list[KernelCase]:
    """Each feature alone, all at once, none; chunks of edits; flaws under what is hidden."""
    return [
        KernelCase("limits", _make, _run, _reference, EXACT),
        KernelCase("record", _make, _run_record, _reference_record, EXACT),
    ]


def _make(_: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """Slots: 0 allows some, 1 has 300 edits and is too short, 2 has bad words, 3 has all."""
    vocab_size = 2085
    logits = torch.randn(7, vocab_size + 11, generator=generator, device=device)[:, :vocab_size]
    logits[1, 4] = float("inf")
    logits[2, 11] = float("nan")
    logits[4] = float("-inf")
    ids = torch.stack(
        [torch.randperm(vocab_size, generator=generator, device=device)[:300] for _ in range(4)]
    ).int()
    # Each token has at most one edit: token 4, if it was drawn, and the first change places.
    ids[1] = torch.where(ids[1] == 4, ids[1, 0], ids[1])
    ids[1, 0], ids[3, :4] = 4, torch.tensor([11, 12, 13, 14], device=device)
    allowed = torch.randint(-(2**31), 2**31, (4, 66), generator=generator, device=device)
    allowed[3, 0] = -1  # token 12 of slot 3 is a stop token, and its output just long enough
    # the words [11], [5 7 12], [5 8 13], [14]; the output ends in 5 7
    words = torch.tensor([11, 5, 7, 12, 5, 8, 13, 14, -9], device=device)
    return {
        "logits": logits,
        "idx_mapping": torch.tensor([0, 1, 2, -1, 3, 4, 5], dtype=torch.int32, device=device),
        "positions": torch.tensor([5, 5, 5, 5, 5, 5, 4], device=device),
        "slot": torch.tensor([0, 1, 2, -1, 3, 1], device=device).int(),
        "has_allowed": torch.tensor([1, 0, 0, 1], device=device).int(),
        "allowed": allowed.int(),
        "num_edits": torch.tensor([0, 300, 0, 4], device=device).int(),
        "edit_ids": ids,
        "edit_bias": torch.randn(4, 300, generator=generator, device=device) * 9,
        "edit_is_stop": torch.randint(0, 2, (4, 300), generator=generator, device=device)
        .int()
        .index_fill_(1, torch.tensor([0, 1], device=device), 1),
        "min_tokens": torch.tensor([0, 6, 6, 5], device=device).int(),
        "num_words": torch.tensor([0, 0, 4, 4], device=device).int(),
        "word_ends": torch.tensor([1, 4, 7, 8], device=device).int().repeat(4, 1),
        "word_tokens": words.int().repeat(4, 1),
        "recent": torch.tensor(
            [[7, 5, 1], [-1, -1, -1], [7, 5, -1], [8, 5, 5]], device=device
        ).int(),
        "tokens": torch.arange(7, device=device) + 100,
        "flaws": torch.tensor([0, 0, 2, 0, 0, 0, 1], device=device),
    }


def _rows_of(a: Inputs) -> LimitRows:
    return LimitRows(*(a[name] for name in _NAMES))


def _run(a: Inputs) -> Outputs:
    marks = logit_bias(a["logits"], a["idx_mapping"], a["positions"], _rows_of(a))
    return {"marks": marks, "logits": a["logits"]}


def _reference(a: Inputs) -> Outputs:
    marks = logit_bias_reference(a["logits"], a["idx_mapping"], a["positions"], _rows_of(a))
    return {"marks": marks, "logits": a["logits"]}


def _run_record(a: Inputs) -> Outputs:
    record(a["tokens"], a["flaws"], a["idx_mapping"], _rows_of(a))
    return {"recent": a["recent"]}


def _reference_record(a: Inputs) -> Outputs:
    record_reference(a["tokens"], a["flaws"], a["idx_mapping"], _rows_of(a))
    return {"recent": a["recent"]}


def compilations() -> list[Compilation]:
    """A vocabulary of 152k; seven recent tokens."""
    whole = {name: "i32" for name in logit_bias_kernel.arg_names if not name.isupper()}
    pointers = {name: "*i32" for name in whole if name.endswith("_ptr")}
    special = {"logits_ptr": "*fp32", "edit_bias_ptr": "*fp32", "positions_ptr": "*i64"}
    record_signature = {
        "tokens_ptr": "*i64",
        "flaws_ptr": "*i64",
        "idx_mapping_ptr": "*i32",
        "slot_ptr": "*i32",
        "recent_ptr": "*i32",
        "num_recent": "i32",
    }
    return [
        Compilation(
            name="limits",
            kernel=logit_bias_kernel,
            signature=whole | pointers | special,
            constants={"BLOCK": BLOCK, "EDITS": EDITS},
            divisible_by_16=("logits_ptr", "stride_n", "allowed_ptr", "vocab_size"),
            limits=CompileLimits(max_registers=64, max_shared_bytes=256),
            num_warps=8,
            required=(r"BAR\.SYNC",),
        ),
        Compilation(
            name="record",
            kernel=record_kernel,
            signature=record_signature,
            constants={"BLOCK": LEAST_RECENT},
            limits=CompileLimits(max_registers=32),
            num_warps=1,
        ),
    ]
