"""causal_conv: the reference against transformers, the CPU against the reference."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mamba2 import modeling_mamba2 as theirs

from tests.ops.native import WAYS, way
from tests.ops.state_steps import Step, assert_same, cuts, steps
from tokenmesh.kernels.causal_conv import TOLERANCE, causal_conv, causal_conv_reference, cpu
from tokenmesh.kernels.state_rows import StateRows

C, W = 24, 4


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kept", [W - 1, W])
def test_reference_equals_transformers(activation: str | None, kept: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, C), torch.randn(C, W), torch.randn(C)
    state = torch.randn(3, C, kept)
    their_state = state[1:2].clone()
    whole = causal_conv_reference(
        x[:8], weight, bias, state, StateRows.of([0], [0], [8]), activation
    )
    expected = theirs.causal_conv1d_fn(x[None, :8].mT, weight, bias, activation)[0].T
    assert_same(whole, expected, 1e-5)
    assert_same(state[0], x[8 - kept : 8].T, 0)

    step = causal_conv_reference(
        x[8:], weight, bias, state, StateRows.of([1], [5], [1]), activation
    )
    expected = theirs.causal_conv1d_update(x[8:, :, None], their_state, weight, bias, activation)
    assert_same(step, expected[..., 0], 1e-5)
    assert_same(state[1:2], their_state, 0)


@pytest.mark.parametrize("native", WAYS)
@settings(max_examples=60)
@given(
    step=steps(),
    shape=st.sampled_from([(W, W), (W, W - 1), (3, 5), (1, 0)]),
    silu=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_cpu_equals_the_reference(
    native: bool,
    step: Step,
    shape: tuple[int, int],
    silu: bool,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    width, kept = shape
    x = torch.randn(sum(step.lengths), C + 8).to(dtype)[:, :C]
    weight = torch.randn(C, width).to(dtype)
    bias = torch.randn(C).to(dtype) if has_bias else None
    state = step.state(C, kept, dtype=dtype)
    expected_state = state.clone()
    activation: Literal["silu"] | None = "silu" if silu else None
    with way(cpu, native):
        actual = causal_conv(x, weight, bias, state, step.rows, activation)
    expected = causal_conv_reference(x, weight, bias, expected_state, step.rows, activation)
    assert_same(actual, expected, TOLERANCE[dtype])
    assert_same(state, expected_state, 0)


@settings(max_examples=20)
@given(lengths=cuts())
def test_a_prompt_may_be_cut_anywhere(lengths: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(lengths), C), torch.randn(C, W)
    whole_state, state = torch.full((2, C, W), float("nan")), torch.full((2, C, W), float("nan"))
    whole = causal_conv(x, weight, None, whole_state, StateRows.of([1], [0], [len(x)]))
    start, parts = 0, []
    for length in lengths:
        rows = StateRows.of([1], [start], [length])
        parts.append(causal_conv(x[start : start + length], weight, None, state, rows))
        start += length
    assert_same(torch.cat(parts), whole, 1e-5)
    assert_same(state, whole_state, 0)


def test_a_state_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="a state of 2 inputs for 4 weights"):
        causal_conv(
            torch.zeros(1, C),
            torch.zeros(C, W),
            None,
            torch.zeros(1, C, W - 2),
            StateRows.of([0], [0], [1]),
        )
