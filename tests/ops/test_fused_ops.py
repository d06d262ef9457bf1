"""The ops that a GPU runs as one kernel, on the CPU against their references."""

from typing import Literal

import pytest
import torch

from tokenmesh.kernels import gelu_mul, qk_norm_rope_kv_write, rms_norm
from tokenmesh.kernels.kv_write import slot_rows
from tokenmesh.kernels.qk_norm_rope_kv_write import HeadNorm

DTYPES = [torch.float32, torch.bfloat16]
SLOTS = [(3, 15), (1, 0), (2, 7)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_mul_equals_the_reference(
    dtype: torch.dtype, approximate: Literal["none", "tanh"]
) -> None:
    torch.manual_seed(0)
    gate_up = 4 * torch.randn(3, 66).to(dtype)
    before = gate_up.clone()
    actual = gelu_mul.gelu_mul(gate_up, approximate)
    expected = gelu_mul.gelu_mul_reference(before, approximate)
    tolerance = gelu_mul.TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_changes_hidden_and_returns_its_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, x = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype)
    weight = torch.randn(40)
    total, normed = rms_norm.add_rms_norm_reference(hidden, x, weight, 1e-5, 0.22)
    actual = rms_norm.add_rms_norm(hidden, x, weight, 1e-5, 0.22)
    tolerance = rms_norm.TOLERANCE[dtype]
    torch.testing.assert_close(hidden, total, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual, normed, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [None, "before", "after"])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_qk_norm_rope_kv_write_equals_the_reference(
    dtype: torch.dtype, norm: str | None, is_scaled: bool
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 4, 2, 20
    qkv = torch.randn(3, heads + 2 * kv_heads, head_dim).to(dtype)
    pages = torch.randn(2, 4, kv_heads, 16, head_dim).to(dtype)
    turns = torch.polar(torch.full((3, 1, 6), 1.2), 9 * torch.rand(3, 1, 6))
    head_norm = None
    if norm is not None:
        head_norm = HeadNorm(torch.randn(heads + kv_heads, head_dim), 1e-5, norm == "after")
    scale = 1 + torch.rand(3) if is_scaled else None
    expected_pages = pages.clone()
    expected = qk_norm_rope_kv_write.qk_norm_rope_kv_write_reference(
        qkv.clone(), expected_pages, SLOTS, turns, head_norm, scale
    )
    blocks, offsets = torch.tensor(SLOTS).unbind(1)
    slots = slot_rows(blocks, offsets, pages.shape)
    actual = qk_norm_rope_kv_write.qk_norm_rope_kv_write(qkv, pages, slots, turns, head_norm, scale)
    tolerance = qk_norm_rope_kv_write.TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pages, expected_pages, atol=tolerance, rtol=tolerance)
