"""gated_delta: the reference against transformers, the CPU against the reference."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from tests.ops.native import WAYS, way
from tests.ops.state_steps import Step, assert_same, cuts, steps
from tokenmesh.kernels.gated_delta import TOLERANCE, cpu, gated_delta, gated_delta_reference
from tokenmesh.kernels.gated_delta.products import decayed_products, unit_lower_inverse
from tokenmesh.kernels.state_rows import StateRows

DK, DV = 24, 40


def tokens_of(
    count: int, key_heads: int, heads: int, channels: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Slices of wider tensors, as models have them; decays from none to nearly all."""
    torch.manual_seed(0)
    width = 2 * key_heads * DK + heads * DV
    wide = torch.randn(count, width + 8).to(dtype)
    gates = torch.rand(count, heads, *([DK] if channels else []))
    return {
        "q": wide[:, : key_heads * DK].view(count, key_heads, DK),
        "k": wide[:, key_heads * DK : 2 * key_heads * DK].view(count, key_heads, DK),
        "v": wide[:, 2 * key_heads * DK : width].view(count, heads, DV),
        "g": -8 * gates**4,
        "beta": (2 * torch.rand(count, heads)).to(dtype),
    }


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("kind", ["recurrent", "chunk", "kimi_recurrent", "kimi_chunk"])
def test_reference_equals_transformers(kind: str, is_normed: bool) -> None:
    function = {
        "recurrent": qwen.torch_recurrent_gated_delta_rule,
        "chunk": qwen.torch_chunk_gated_delta_rule,
        "kimi_recurrent": kimi.recurrent_kimi_delta_attention,
        "kimi_chunk": kimi.chunk_kimi_delta_attention,
    }[kind]
    channels = kind.startswith("kimi")
    tokens = tokens_of(70, 4 if channels else 2, 4, channels)
    if not is_normed:
        tokens["k"] = tokens["k"] / DK**0.5
        tokens["beta"] = tokens["beta"] / 2
    state = torch.randn(3, 4, DK, DV)
    expected, expected_state = function(
        **{
            {"q": "query", "k": "key", "v": "value"}.get(name, name): each[None]
            for name, each in tokens.items()
        },
        initial_state=state[1:2].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=is_normed,
    )
    rows = StateRows.of([1], [9], [70])
    actual = gated_delta_reference(**tokens, state=state, rows=rows, use_qk_l2norm=is_normed)
    assert_same(actual, expected[0], 2e-5)
    assert_same(state[1:2], expected_state, 2e-5)


@pytest.mark.parametrize("native", WAYS)
@settings(max_examples=60)
@given(
    step=steps(),
    heads=st.sampled_from([(1, 1), (2, 4), (3, 3)]),
    channels=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_cpu_equals_the_reference(
    native: bool, step: Step, heads: tuple[int, int], channels: bool, dtype: torch.dtype
) -> None:
    tokens = tokens_of(sum(step.lengths), *heads, channels, dtype)
    state = step.state(heads[1], DK, DV)
    expected_state = state.clone()
    with way(cpu, native):
        actual = gated_delta(**tokens, state=state, rows=step.rows, use_qk_l2norm=True)
    expected = gated_delta_reference(
        **tokens, state=expected_state, rows=step.rows, use_qk_l2norm=True
    )
    assert_same(actual, expected, TOLERANCE[dtype])
    assert_same(state, expected_state, TOLERANCE[torch.float32])


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("channels", [False, True])
def test_large_states_are_changed_where_they_are(channels: bool, native: bool) -> None:
    torch.manual_seed(0)
    heads, dim = 4, 128
    q, k, v = torch.randn(3, 3, heads, dim)
    g = -torch.rand(3, heads, *([dim] if channels else []))
    beta, state = torch.rand(3, heads), torch.full((6, heads, dim, dim), float("nan"))
    state[[4, 2]] = torch.randn(2, heads, dim, dim)
    expected_state = state.clone()
    rows = StateRows.of([4, 0, 2], [3, 0, 70], [1, 1, 1])
    with way(cpu, native):
        actual = gated_delta(q, k, v, g, beta, state, rows, 0.5, use_qk_l2norm=True)
    expected = gated_delta_reference(q, k, v, g, beta, expected_state, rows, 0.5, True)
    assert_same(actual, expected, 1e-5)
    assert_same(state, expected_state, 1e-5)


@settings(max_examples=20)
@given(lengths=cuts(), channels=st.booleans())
def test_a_prompt_may_be_cut_anywhere(lengths: list[int], channels: bool) -> None:
    tokens = tokens_of(sum(lengths), 2, 2, channels)
    states = torch.full((2, 3, 2, DK, DV), float("nan"))
    rows = StateRows.of([1], [0], [sum(lengths)])
    whole = gated_delta(**tokens, state=states[0], rows=rows, use_qk_l2norm=True)
    start, parts = 0, []
    for length in lengths:
        some = {name: each[start : start + length] for name, each in tokens.items()}
        rows = StateRows.of([1], [start], [length])
        parts.append(gated_delta(**some, state=states[1], rows=rows, use_qk_l2norm=True))
        start += length
    assert_same(torch.cat(parts), whole, 1e-5)
    assert_same(states[1], states[0], 1e-5)


def test_a_cut_at_a_border_of_chunks_changes_no_bit() -> None:
    tokens = tokens_of(200, 2, 4, channels=False)
    states = torch.full((2, 1, 4, DK, DV), float("nan"))
    whole = gated_delta(**tokens, state=states[0], rows=StateRows.of([0], [0], [200]))
    parts = []
    for first, last in ((0, 128), (128, 200)):
        some = {name: each[first:last] for name, each in tokens.items()}
        rows = StateRows.of([0], [first], [last - first])
        parts.append(gated_delta(**some, state=states[1], rows=rows))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("channels", [False, True])
def test_decays_to_nothing_give_finite_numbers(channels: bool) -> None:
    """exp(-64 * 100) is 0 in float32, and its inverse infinite."""
    tokens = tokens_of(100, 1, 1, channels)
    tokens["g"] = torch.full_like(tokens["g"], -100.0)
    tokens["g"][::3] = -1e-3
    state = torch.randn(1, 1, DK, DV)
    expected_state = state.clone()
    rows = StateRows.of([0], [10], [100])
    actual = gated_delta(**tokens, state=state, rows=rows, use_qk_l2norm=True)
    expected = gated_delta_reference(**tokens, state=expected_state, rows=rows, use_qk_l2norm=True)
    assert_same(actual, expected, 1e-5)
    assert_same(state, expected_state, 1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 31, 64])
def test_inverse_and_products_equal_their_definitions(count: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(2, count, count) / math.sqrt(count)
    system = torch.eye(count) + matrix.tril(-1)
    assert_same(unit_lower_inverse(matrix) @ system, torch.eye(count).expand(2, -1, -1), 1e-4)
    left, key = torch.randn(3, 2, count, DK), torch.randn(2, count, DK)
    fallen = -torch.rand(2, count, DK).cumsum(1)
    between = (fallen[:, :, None] - fallen[:, None]).exp()
    expected = torch.einsum("mhid,hjd,hijd->mhij", left, key, between).tril()
    assert_same(decayed_products(left, key, fallen), expected, 1e-4)


def test_a_state_of_another_type_and_odd_heads_are_refused() -> None:
    tokens = tokens_of(1, 2, 4, channels=False)
    rows = StateRows.of([0], [0], [1])
    with pytest.raises(ValueError, match=r"the state is torch\.bfloat16, not float32"):
        gated_delta(**tokens, state=torch.zeros(1, 4, DK, DV, dtype=torch.bfloat16), rows=rows)
    tokens["v"] = tokens["v"][:, :3]
    with pytest.raises(ValueError, match="3 value heads for 2 key heads"):
        gated_delta(**tokens, state=torch.zeros(1, 3, DK, DV), rows=rows)
