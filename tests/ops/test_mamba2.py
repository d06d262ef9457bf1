"""mamba2: the reference against transformers, the CPU against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon_h1
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.mamba2 import modeling_mamba2 as theirs
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h

from tests.ops.native import WAYS, way
from tests.ops.state_steps import Step, assert_same, cuts, steps
from tokenmesh.kernels.mamba2 import TOLERANCE, cpu, mamba2, mamba2_reference
from tokenmesh.kernels.state_rows import StateRows

P, N = 24, 16
FAMILIES = [theirs, bamba, falcon_h1, granite, nemotron_h]


def tokens_of(
    count: int, heads: int, groups: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Slices of wider tensors, as models have them."""
    torch.manual_seed(0)
    width = heads * P + 2 * groups * N
    wide = torch.randn(count, width + 8).to(dtype)
    return {
        "x": wide[:, : heads * P].view(count, heads, P),
        "B": wide[:, heads * P : heads * P + groups * N].view(count, groups, N),
        "C": wide[:, heads * P + groups * N : width].view(count, groups, N) / 2,
        "dt": torch.randn(count, heads).to(dtype),
    }


def weights_of(heads: int) -> dict[str, Any]:
    """D, A and the bias."""
    torch.manual_seed(1)
    names = ("D", "dt_bias")
    return {"A": -4 * torch.rand(heads), **{name: torch.randn(heads) for name in names}}


@pytest.mark.parametrize("module", FAMILIES, ids=lambda each: each.__name__.rsplit("_", 1)[-1])
@pytest.mark.parametrize("chunk_size", [16, 256])
def test_reference_equals_the_chunks_of_transformers(module: object, chunk_size: int) -> None:
    tokens, weights, state = tokens_of(70, 4, 2), weights_of(4), torch.randn(3, 4, P, N)
    expected, expected_state = module.mamba2_chunk_scan(  # type: ignore[attr-defined]
        tokens["x"][None],
        **{name: tokens[name][None] for name in ("dt", "B", "C")},
        **weights,
        chunk_size=chunk_size,
        initial_states=state[1:2].clone(),
        dt_softplus=True,
        dt_limit=(0.1, 1.5),
        return_final_states=True,
    )
    rows = StateRows.of([1], [9], [70])
    actual = mamba2_reference(**tokens, **weights, state=state, rows=rows, dt_limit=(0.1, 1.5))
    assert_same(actual, expected[0], 5e-5)
    assert_same(state[1:2], expected_state, 5e-5)


@pytest.mark.parametrize("module", FAMILIES, ids=lambda each: each.__name__.rsplit("_", 1)[-1])
@pytest.mark.parametrize("has_gate", [False, True])
def test_reference_equals_the_state_update_of_transformers(module: object, has_gate: bool) -> None:
    tokens, weights, state = tokens_of(2, 4, 2), weights_of(4), torch.randn(2, 4, P, N)
    z = torch.randn(2, 4, P) if has_gate else None
    expected_state = state.clone()
    by_element = {name: weights[name][:, None].expand(-1, P) for name in ("D", "dt_bias")}
    expected = module.mamba2_selective_state_update(  # type: ignore[attr-defined]
        expected_state,
        tokens["x"],
        tokens["dt"][..., None].expand(-1, -1, P),
        weights["A"][:, None, None].expand(-1, P, N),
        tokens["B"],
        tokens["C"],
        **by_element,
        dt_softplus=True,
        z=z,
    )
    rows = StateRows.of([0, 1], [5, 6], [1, 1])
    actual = mamba2_reference(**tokens, **weights, state=state, rows=rows, z=z)
    assert_same(actual, expected, 1e-5)
    assert_same(state, expected_state, 1e-5)


@pytest.mark.parametrize("native", WAYS)
@settings(max_examples=60)
@given(
    step=steps(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    is_plain=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_cpu_equals_the_reference(
    native: bool, step: Step, heads: tuple[int, int], is_plain: bool, dtype: torch.dtype
) -> None:
    tokens, weights = tokens_of(sum(step.lengths), *heads, dtype), weights_of(heads[0])
    more: dict[str, Any] = {} if is_plain else {"z": torch.randn(tokens["x"].shape).to(dtype)}
    limit = (0.0, float("inf")) if is_plain else (0.2, 1.0)
    if is_plain:
        weights = {"A": weights["A"]}
    state = step.state(heads[0], P, N)
    expected_state = state.clone()
    with way(cpu, native):
        actual = mamba2(**tokens, **weights, **more, state=state, rows=step.rows, dt_limit=limit)
    expected = mamba2_reference(
        **tokens, **weights, **more, state=expected_state, rows=step.rows, dt_limit=limit
    )
    assert_same(actual, expected, TOLERANCE[dtype])
    assert_same(state, expected_state, TOLERANCE[torch.float32])


@pytest.mark.parametrize("native", WAYS)
def test_large_states_are_changed_where_they_are(native: bool) -> None:
    torch.manual_seed(0)
    heads, dim, size = 16, 64, 128
    x, z = torch.randn(2, 3, heads, dim)
    gain, read = torch.randn(2, 3, 2, size) / 4
    state = torch.full((6, heads, dim, size), float("nan"))
    state[[4, 2]] = torch.randn(2, heads, dim, size)
    expected_state = state.clone()
    rows = StateRows.of([4, 0, 2], [3, 0, 70], [1, 1, 1])
    inputs = (x, torch.randn(3, heads), -torch.rand(heads), gain, read)
    with way(cpu, native):
        actual = mamba2(*inputs, state, rows, z=z)
    expected = mamba2_reference(*inputs, expected_state, rows, z=z)
    assert_same(actual, expected, 1e-5)
    assert_same(state, expected_state, 1e-5)


@settings(max_examples=20)
@given(lengths=cuts())
def test_a_prompt_may_be_cut_anywhere(lengths: list[int]) -> None:
    tokens, weights = tokens_of(sum(lengths), 4, 2), weights_of(4)
    states = torch.full((2, 3, 4, P, N), float("nan"))
    rows = StateRows.of([1], [0], [sum(lengths)])
    whole = mamba2(**tokens, **weights, state=states[0], rows=rows)
    start, parts = 0, []
    for length in lengths:
        some = {name: each[start : start + length] for name, each in tokens.items()}
        rows = StateRows.of([1], [start], [length])
        parts.append(mamba2(**some, **weights, state=states[1], rows=rows))
        start += length
    assert_same(torch.cat(parts), whole, 2e-5)
    assert_same(states[1], states[0], 2e-5)


def test_a_state_of_another_type_and_odd_groups_are_refused() -> None:
    tokens, weights, rows = tokens_of(1, 4, 2), weights_of(4), StateRows.of([0], [0], [1])
    state = torch.zeros(1, 4, P, N, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"the state is torch\.float16, not float32"):
        mamba2(**tokens, **weights, state=state, rows=rows)
    tokens["x"] = tokens["x"][:, :3]
    with pytest.raises(ValueError, match="3 heads for 2 groups"):
        mamba2(**tokens, **weights, state=torch.zeros(1, 3, P, N), rows=rows)
