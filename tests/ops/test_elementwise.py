"""rms_norm, rope and silu_mul against their references."""

import pytest
import torch

from tests.ops.native import WAYS, way
from tokenmesh.kernels import rms_norm as norm
from tokenmesh.kernels import rope
from tokenmesh.kernels import silu_mul as act

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 3, 17]


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("features", [1, 33, 896])
def test_rms_norm_equals_the_reference(
    dtype: torch.dtype, rows: int, features: int, native: bool
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, features).to(dtype), torch.randn(features)
    expected = norm.rms_norm_reference(x, weight, 1e-5)
    tolerance = norm.TOLERANCE[dtype]
    with way(norm.cpu, native):
        actual = norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_takes_a_weight_for_each_head_and_strided_input(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, 12).to(dtype)[:, :4]
    weight = torch.randn(4, 12)
    expected = norm.rms_norm_reference(x, weight, 1e-6)
    tolerance = norm.TOLERANCE[dtype]
    torch.testing.assert_close(
        norm.rms_norm(x, weight, 1e-6), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("head_dim", "pairs"), [(2, 1), (12, 6), (20, 3), (64, 32)])
def test_rope_equals_the_reference(
    dtype: torch.dtype, rows: int, head_dim: int, pairs: int
) -> None:
    torch.manual_seed(0)
    buffer = torch.randn(rows, 5, head_dim).to(dtype)
    before = buffer.clone()
    turns = torch.polar(torch.rand(rows, 1, pairs) + 0.5, torch.randn(rows, 1, pairs) * 9)
    rope.rotate(buffer[:, :3], turns)
    tolerance = rope.TOLERANCE[dtype] * 4
    expected = rope.rope_reference(before[:, :3], turns)
    torch.testing.assert_close(buffer[:, :3], expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(buffer[:, 3:], before[:, 3:])


def test_interleaved_rows_turn_as_halves_do() -> None:
    torch.manual_seed(0)
    heads, head_dim, rotary = 3, 10, 6
    weight, x = torch.randn(heads * head_dim, 8), torch.randn(4, 8)
    angle = torch.randn(4, 1, rotary // 2)
    halves = (x @ weight.t()).view(4, heads, head_dim)
    cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
    first, second = halves[..., : rotary // 2], halves[..., rotary // 2 : rotary]
    turned = halves[..., :rotary] * cos + torch.cat([-second, first], -1) * sin
    expected = torch.cat([turned, halves[..., rotary:]], -1)

    pairs = (x @ rope.interleave_rows(weight, head_dim, rotary).t()).view(4, heads, head_dim)
    rope.rotate(pairs, torch.polar(torch.ones_like(angle), angle))
    order = rope.interleave_rows(torch.arange(head_dim), head_dim, rotary)
    torch.testing.assert_close(pairs, expected[..., order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("features", [1, 33, 512])
def test_silu_mul_equals_the_reference(
    dtype: torch.dtype, rows: int, features: int, native: bool
) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * features).to(dtype) * 3
    before = gate_up.clone()
    tolerance = act.TOLERANCE[dtype]
    with way(act.cpu, native):
        actual = act.silu_mul(gate_up)
    expected = act.silu_mul_reference(before)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(gate_up, before)
