"""Cases of logprobs: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.logprobs.answer import Logprobs
from tokenmesh.kernels.logprobs.reference import TOLERANCE, logprobs_reference
from tokenmesh.kernels.logprobs.triton import (
    BLOCK,
    logprobs,
    logprobs_join_kernel,
    logprobs_survey_kernel,
)


def cases() -> list[KernelCase]:
    """No, few, many and all alternatives; one block and several; equal logits; no rows."""
    return [
        _case("none", num_top=0, vocab_size=301),
        _case("five", num_top=5, vocab_size=301),
        _case("one-block", num_top=3, vocab_size=37),
        _case("everything", num_top=37, vocab_size=37),
        _case("sorted", num_top=70, vocab_size=301),
        _case("no rows", num_top=2, vocab_size=37, indices=()),
    ]


def _case(
    name: str, num_top: int, vocab_size: int, indices: tuple[int, ...] = (3, 0, 2)
) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        logits = torch.randn(4, vocab_size + 3, generator=generator, device=device) * 5
        logits[2] = logits[2].round()
        logits[3, 1:9] = float("-inf")
        return {
            "logits": logits.to(dtype)[:, :vocab_size],
            "indices": torch.tensor(indices, dtype=torch.int32, device=device),
            "tokens": torch.tensor([vocab_size - 1, 0, 5, 9], device=device),
        }

    def run(a: Inputs) -> Outputs:
        return _outputs(logprobs(a["logits"], a["indices"], a["tokens"], num_top, block=64))

    def reference(a: Inputs) -> Outputs:
        return _outputs(logprobs_reference(a["logits"], a["indices"], a["tokens"], num_top))

    return KernelCase(name, make, run, reference, TOLERANCE)


def _outputs(answer: Logprobs) -> Outputs:
    return {name: getattr(answer, name) for name in Logprobs.__dataclass_fields__}


def compilations() -> list[Compilation]:
    """A vocabulary of 152k with 20 alternatives."""
    batch = {"logits_ptr": "*bf16", "stride_n": "i32", "indices_ptr": "*i32", "tokens_ptr": "*i64"}
    parts = {
        "best_ptr": "*fp32",
        "total_ptr": "*fp32",
        "larger_ptr": "*i32",
        "keys_ptr": "*i64",
    }
    out = {
        "norm_ptr": "*fp32",
        "chosen_ptr": "*fp32",
        "ranks_ptr": "*i32",
        "top_ids_ptr": "*i32",
        "top_ptr": "*fp32",
    }
    survey = batch | parts | {"vocab_size": "i32", "num_top": "i32"}
    join = batch | parts | out | {"num_blocks": "i32", "num_top": "i32"}
    return [
        Compilation(
            name="survey",
            kernel=logprobs_survey_kernel,
            signature=survey,
            constants={"BLOCK": BLOCK},
            divisible_by_16=("logits_ptr", "stride_n", "vocab_size"),
            limits=CompileLimits(max_registers=96, max_shared_bytes=256),
            num_warps=8,
            required=(r"LDG\.E\.128",),
        ),
        Compilation(
            name="join",
            kernel=logprobs_join_kernel,
            signature=join,
            constants={"BLOCKS": 64, "KEYS": 2048},
            limits=CompileLimits(max_registers=96, max_shared_bytes=256),
            num_warps=8,
        ),
    ]
