"""Attention within rows, layer norms and GELU in C are torch's, alone and among other rows."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels import native

pytestmark = [needs_native, in_avx2]

LENGTHS = (1, 5, 8, 31, 32, 33, 70)


def attended(
    heads: list[torch.Tensor], counts: tuple[int, ...], window: int | None
) -> torch.Tensor:
    firsts = torch.tensor([0, *counts]).cumsum(0)
    query, key, value = heads
    assert native.fits_rows(query, key, value)
    return native.native_row_attention(query, key, value, firsts, window, 0.2)


@pytest.mark.parametrize("window", [None, 0, 3, 40])
@pytest.mark.parametrize(
    ("dims", "kv_heads", "dtype", "atol"),
    [
        ((32, 32), 4, torch.float32, 2e-6),
        ((64, 48), 2, torch.float32, 2e-6),
        ((16, 96), 1, torch.bfloat16, 2e-2),
    ],
)
def test_rows_attend_to_themselves(
    dims: tuple[int, int], kv_heads: int, dtype: torch.dtype, atol: float, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, (dim, value_dim) = sum(LENGTHS), dims
    # as a merged product leaves them: the heads of a token side by side
    sizes = [4 * dim, kv_heads * dim, kv_heads * value_dim]
    merged = torch.randn(1, tokens, sum(sizes), generator=generator).to(dtype)
    shapes = (dim, dim, value_dim)
    heads = [
        part.view(1, tokens, -1, size).transpose(1, 2)
        for part, size in zip(torch.split(merged, sizes, dim=-1), shapes, strict=True)
    ]
    found = attended(heads, LENGTHS, window)
    first = 0
    for count in LENGTHS:
        rows = [each[:, :, first : first + count] for each in heads]
        places = torch.arange(count)
        far = count if window is None else window
        mask = (places[:, None] - places[None]).abs() <= far
        q, k, v = (each.float() for each in rows)
        expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
        mine = found[:, first : first + count]
        torch.testing.assert_close(mine.float(), expected.transpose(1, 2), atol=atol, rtol=atol)
        alone = [each.contiguous() for each in rows]
        assert torch.equal(attended(alone, (count,), window), mine)
        first += count


def test_numbers_that_are_not_finite_stay_so() -> None:
    heads = [torch.randn(1, 1, 20, 16) for _ in range(3)]
    heads[1][0, 0, 3] = torch.nan
    found = attended(heads, (10, 10), None)
    assert bool(found[:, :10].isnan().all())
    assert bool(found[:, 10:].isfinite().all())


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_norms_and_gelu_are_those_of_torch(dtype: torch.dtype, atol: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(3, 37, 100, generator=generator) * 3 + 1).to(dtype)
    weight, bias = (torch.randn(100, generator=generator).to(dtype) for _ in range(2))
    for scale, shift in ((weight, bias), (weight, None), (None, None)):
        found = native.native_layer_norm(x, scale, shift, 1e-5)
        expected = layer_norm(x, (100,), scale, shift, 1e-5)
        torch.testing.assert_close(found, expected, atol=atol, rtol=atol)
    torch.testing.assert_close(native.native_gelu(x), gelu(x), atol=atol, rtol=atol)
    edges = torch.tensor([0.0, -0.0, 30.0, -30.0, torch.nan, 1e-30, -4.0])
    torch.testing.assert_close(
        native.native_gelu(edges), gelu(edges), atol=2e-6, rtol=0, equal_nan=True
    )
