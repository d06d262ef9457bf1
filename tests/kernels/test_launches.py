"""Launches as on a GPU, as far as they can be seen without one."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.kernels.interpreter import VARIABLE

pytest.importorskip("triton")

from tests.kernels import checks
from tests.kernels.case import KernelCase
from tests.kernels.discovery import cases_module, ops
from tests.kernels.far_device import FAR, FarDevice, FarGenerator, is_far
from tests.kernels.guarded import Guarded, GuardedMemory
from tests.kernels.launches import Launches
from tokenmesh.engine.exec.cuda.step_buffer import apply_writes, pack_writes
from tokenmesh.engine.plan import NewRow
from tokenmesh.engine.sampling.device_sampler import DeviceSampler
from tokenmesh.kernels.logprobs import logprobs
from tokenmesh.kernels.moe import ExpertsSpec, experts
from tokenmesh.kernels.paged_attention import DeviceRows, paged_attention
from tokenmesh.kernels.step_inputs import RowState
from tokenmesh.shared.messages.sampling import SamplingParams

pytestmark = [
    pytest.mark.skipif(os.environ.get(VARIABLE) == "1", reason="a process that interprets"),
    pytest.mark.timeout(120),
]
VOCAB, ROWS = 160, 40
SIZES = [1, 2, 3, 4, 5, 6, 8, 16, 17, 33]


@pytest.mark.parametrize("op", ops())
def test_the_gpu_tests_can_run_on_a_separate_device(op: str) -> None:
    """In bfloat16 where there are floats; Triton's warnings are errors here as there."""
    for case in cases_module(op).cases():
        is_narrow = torch.bfloat16 in case.tolerance
        up_to_launches(case, torch.bfloat16 if is_narrow else torch.float32)


def up_to_launches(case: KernelCase, dtype: torch.dtype) -> None:
    """As `check`, but that kernels do not run, so that numbers are not compared."""
    with patch.object(torch, "Generator", FarGenerator), FarDevice() as device, Launches():
        expected = case.reference(checks.inputs_of(case, dtype, "cuda"))
        inputs = Guarded(checks.inputs_of(case, dtype, "cuda")).inputs
        device.may_read = False
        with GuardedMemory():
            actual = case.run(inputs)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert is_far(actual[key]), f"{case.name}: {key} is on the host"
        assert (actual[key].shape, actual[key].dtype) == (value.shape, value.dtype), key


def draw(num_rows: int) -> None:
    """Every feature of the sampler, in lists as long as there are rows."""
    sampler = DeviceSampler(ROWS, VOCAB, frozenset({2}), FAR)
    for row in range(num_rows):
        params = SamplingParams(
            seed=row,
            max_tokens=9,
            top_k=5,
            presence_penalty=1.0,
            logit_bias=dict.fromkeys(range(num_rows), 1.0),
            bad_words_ids=[[3] * min(num_rows, 9), *([word] for word in range(row))],
            logprobs=min(num_rows, 20),
        )
        sampler.add(NewRow(row, [1, 2, 3], 3, params, [], False))
    sampler.apply()
    sampler.draw(
        sampler.needs(range(num_rows)),
        torch.arange(num_rows, dtype=torch.int32, device=FAR),
        torch.zeros(num_rows, VOCAB, device=FAR),
        torch.zeros(num_rows, dtype=torch.int64, device=FAR),
    )


def write(num_writes: int) -> None:
    """As many rows of the state."""
    state = RowState.zeros(ROWS, 64, 4, FAR)
    packed = pack_writes([(64 * row, [7] * (row + 1)) for row in range(num_writes)])
    apply_writes(state.flat, packed.to(FAR), num_writes)


def show_prompt(num_top: int) -> None:
    """Log-probabilities of so many alternatives."""
    logits = torch.zeros(num_top, 9000, device=FAR)
    indices = torch.arange(num_top, dtype=torch.int32, device=FAR)
    logprobs(logits, indices, torch.zeros(num_top, dtype=torch.int64, device=FAR), num_top - 1)


def attend_split(num_rows: int, head_dim: int = 64, num_splits: int | None = None) -> None:
    """Rows of one token in as many parts, and one more."""
    query = torch.zeros(num_rows, 16, head_dim, dtype=torch.bfloat16, device=FAR)
    pages = torch.zeros(2, 9, 4, 16, head_dim, dtype=torch.bfloat16, device=FAR)
    step = DeviceRows(
        cu_q=torch.arange(num_rows + 1, dtype=torch.int32, device=FAR),
        seq_lens=torch.zeros(num_rows, dtype=torch.int32, device=FAR),
        block_tables=torch.zeros(num_rows, 16, dtype=torch.int32, device=FAR),
        num_short=num_rows,
        max_short_query=1,
        num_long_tokens=0,
        num_splits=num_splits or num_rows + 1,
    )
    paged_attention(query, pages, step, 1.0)


def run_experts(num_tokens: int) -> None:
    """Two of 64 experts a token."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=FAR)

    ids, weights = zeros(num_tokens, 2, dtype=torch.int64), zeros(num_tokens, 2)
    stacks = zeros(64, 96, 32), zeros(64, 32, 48)
    experts(zeros(num_tokens, 32), ids, weights, *stacks, ExpertsSpec())


@pytest.mark.parametrize("work", [draw, write, show_prompt, attend_split, run_experts])
def test_a_step_of_another_size_compiles_nothing(work: Callable[[int], Any]) -> None:
    with FarDevice(), Launches() as launches:
        for size in SIZES:
            work(size)
    compiled = Counter(variant.name for variant in launches.variants)
    assert compiled
    assert {name: count for name, count in compiled.items() if count > 1} == {}


@pytest.mark.parametrize("head_dim", [64, 256])
def test_parts_of_a_row_are_computed_in_the_tiles_of_whole_rows(head_dim: int) -> None:
    with FarDevice(), Launches() as launches:
        for num_splits in (1, 2):
            attend_split(3, head_dim, num_splits)
    whole, split = (each.constants for each in launches.variants if each.name == "decode_kernel")
    assert whole["SPLIT"] != split["SPLIT"]
    assert (whole["M"], whole["N"]) == (split["M"], split["N"])
