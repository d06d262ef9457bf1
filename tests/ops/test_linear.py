"""linear against its reference, packed and plain."""

import pytest
import torch

from tokenmesh.kernels.linear import TOLERANCE, can_pack, linear, linear_reference, pack

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(48, 80), (33, 7), (1, 1), (896, 640), (130, 4099)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_linear_equals_the_reference(
    dtype: torch.dtype, has_bias: bool, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    layer = pack(weight.clone(), bias)
    for tokens in (1, 2, 7, 64):
        x = torch.randn(tokens, inputs).to(dtype)
        expected = linear_reference(x, weight, bias)
        limit = TOLERANCE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(linear(x, layer), expected, atol=limit, rtol=0)


def test_only_small_float32_layers_keep_their_plain_weight() -> None:
    large = pack(torch.zeros(1024, 1024), None)
    assert (large.packed is None) != can_pack(torch.float32)
    assert (large.plain is None) == can_pack(torch.float32)
    small = pack(torch.zeros(16, 16), None)
    assert small.plain is not None
    half = pack(torch.zeros(16, 16, dtype=torch.bfloat16), None)
    assert (half.plain is None) == can_pack(torch.bfloat16)


def test_both_forms_of_a_layer_agree() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    layer = pack(weight, None)
    for tokens in (layer.max_plain_tokens, layer.max_plain_tokens + 1):
        x = torch.randn(tokens, 256)
        expected = linear_reference(x, weight, None)
        torch.testing.assert_close(linear(x, layer), expected, atol=1e-4, rtol=0)


def test_what_the_processor_cannot_pack_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    weight = torch.randn(64, 32).bfloat16()
    layer = pack(weight, None)
    assert layer.packed is None
    x = torch.randn(3, 32).bfloat16()
    expected = linear_reference(x, weight, None)
    torch.testing.assert_close(linear(x, layer), expected, atol=0.2, rtol=0)
