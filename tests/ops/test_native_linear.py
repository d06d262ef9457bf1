"""The C kernel of linear layers: right, and the same bits for every number of tokens."""

import pytest
import torch

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels.linear import TOLERANCE, linear_reference
from tokenmesh.kernels.native import NativeWeight, native_linear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(48, 80), (34, 7), (2, 1), (896, 640), (130, 4099)]
TOKENS = (1, 2, 5, 6, 7, 12, 13, 64)
"""Around the sizes of the tiles."""

pytestmark = [needs_native, in_avx2]


def _case(
    dtype: torch.dtype, inputs: int, outputs: int, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    return weight, torch.randn(outputs).to(dtype) if has_bias else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_it_equals_the_reference(
    dtype: torch.dtype, has_bias: bool, inputs: int, outputs: int
) -> None:
    weight, bias = _case(dtype, inputs, outputs, has_bias)
    packed = NativeWeight.pack(weight, bias)
    for tokens in TOKENS:
        x = torch.randn(tokens, inputs).to(dtype)
        expected = linear_reference(x, weight, bias)
        limit = TOLERANCE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(native_linear(x, packed), expected, atol=limit, rtol=0)
        wide = native_linear(x, packed, torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.to(dtype), native_linear(x, packed), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [130, 160, 1056])
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype, inputs: int) -> None:
    weight, bias = _case(dtype, inputs, 330, has_bias=True)
    packed = NativeWeight.pack(weight, bias)
    x = torch.randn(300, inputs).to(dtype)
    whole = native_linear(x, packed)
    for tokens in (*TOKENS, 15, 16, 17, 33, 270):
        for first in (0, 300 - tokens):
            part = native_linear(x[first : first + tokens], packed)
            assert torch.equal(part, whole[first : first + tokens])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_x_may_lie_apart(dtype: torch.dtype) -> None:
    weight, _ = _case(dtype, 48, 40, has_bias=False)
    packed = NativeWeight.pack(weight, None)
    wide = torch.randn(9, 3, 48).to(dtype)
    assert torch.equal(
        native_linear(wide[:, 1], packed), native_linear(wide[:, 1].contiguous(), packed)
    )
    across = torch.randn(48, 9).to(dtype).t()
    assert torch.equal(native_linear(across, packed), native_linear(across.contiguous(), packed))


def test_weights_that_do_not_fit_are_distinguished() -> None:
    assert NativeWeight.fits(torch.zeros(3, 5))
    assert NativeWeight.fits(torch.zeros(3, 6, dtype=torch.bfloat16))
    assert not NativeWeight.fits(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert not NativeWeight.fits(torch.zeros(3, 6, dtype=torch.float16))
