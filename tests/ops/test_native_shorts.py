"""Products of 16-bit integers are those of float32 to about 1e-4, whatever the numbers."""

import pytest
import torch

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels.native import NativeShorts

pytestmark = [needs_native, in_avx2]


def _error(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """Relative to what products of random signs add up to."""
    found = NativeShorts.pack(weight, bias).product(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)[None]
    return float(((found - exact).abs() / (size + 1e-300)).nan_to_num().max() * x.shape[1] ** 0.5)


@pytest.mark.parametrize("tokens", [1, 11, 12, 13, 97, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 256), (100, 300), (70, 1536)])
def test_products_are_those_of_float32(tokens: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    # a few times the standard deviation: the largest of thousands of outputs
    assert _error(x, weight, bias) < 2e-3
    assert _error(x * 1e-20, weight * 1e20) < 2e-3


def test_outliers_keep_the_others() -> None:
    """In x they count for their block, in the weight for their row."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(20, 512, generator=generator) for _ in range(2))
    x[:, 70] = 1e4
    weight[:, 70] = 0
    weight[3, 5] = 100
    found = NativeShorts.pack(weight, None).product(x)
    first = x.clone()
    first[:, 64:128] = 0
    apart = NativeShorts.pack(weight, None).product(first)
    torch.testing.assert_close(apart, first @ weight.T, atol=5e-2, rtol=1e-3)
    # all of a block's integers are multiples of its scale
    torch.testing.assert_close(found, x @ weight.T, atol=30.0, rtol=0)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(sign: int) -> None:
    x = torch.full((13, 512), 3e4)
    for row in (torch.full((512,), 7.0), torch.eye(512)[5] * 9 + 1e-6):
        weight = sign * row.repeat(33, 1)
        torch.testing.assert_close(
            NativeShorts.pack(weight, None).product(x), x @ weight.T, rtol=1e-3, atol=0
        )


def test_rows_do_not_depend_on_each_other() -> None:
    x, weight = torch.randn(100, 384), torch.randn(130, 384)
    layer = NativeShorts.pack(weight, None)
    whole = layer.product(x)
    for first, last in ((0, 1), (5, 17), (40, 100)):
        assert torch.equal(layer.product(x[first:last]), whole[first:last])
    assert torch.equal(layer.product(x.repeat(1, 2)[:, :384]), whole)


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_show() -> None:
    x, weight = torch.randn(4, 256), torch.randn(40, 256)
    x[0], x[1, 3], x[2, 200] = 0, torch.nan, torch.inf
    weight[1] = 0
    found = NativeShorts.pack(weight, None).product(x)
    assert bool((found[0] == 0).all())
    assert bool(found[1:3].isnan().all())
    assert bool(found[3].isfinite().all())
    assert float(found[3, 1]) == 0.0
    weight[2, 2] = torch.nan
    assert not NativeShorts.fits(weight)


def test_gelu_is_applied_to_the_sums() -> None:
    x, weight, bias = torch.randn(30, 256), torch.randn(50, 256) / 16, torch.randn(50)
    layer = NativeShorts.pack(weight, bias)
    out = torch.empty(30, 50)
    layer.product_into(x, out, has_gelu=True)
    plain = layer.product(x)
    torch.testing.assert_close(out, torch.nn.functional.gelu(plain), atol=2e-6, rtol=1e-6)
