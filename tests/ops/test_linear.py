"""linear against its reference, packed and plain."""

import pytest
import torch

from tokenmesh.kernels.linear import (
    TOLERANCE,
    Linear,
    OneDnnWeight,
    PlainWeight,
    can_pack,
    linear,
    linear_reference,
    pack,
)
from tokenmesh.kernels.lora import AdapterRows, LoraBank, LoraPart, LoraWeights, StepAdapters

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
    if not can_pack(torch.float32):
        pytest.skip("oneDNN has no kernels here")
    for size, is_kept in ((1024, False), (16, True)):
        weight = pack(torch.zeros(size, size), None).weight
        assert isinstance(weight, OneDnnWeight)
        assert (weight.plain is not None) == is_kept


def test_both_forms_of_a_layer_agree() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    layer = pack(weight, None)
    border = layer.weight.max_plain_tokens if isinstance(layer.weight, OneDnnWeight) else 1
    for tokens in (border, border + 1):
        x = torch.randn(tokens, 256)
        expected = linear_reference(x, weight, None)
        torch.testing.assert_close(linear(x, layer), expected, atol=1e-4, rtol=0)


def test_what_the_processor_cannot_pack_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    weight = torch.randn(64, 32).bfloat16()
    layer = pack(weight, None)
    assert isinstance(layer.weight, PlainWeight)
    x = torch.randn(3, 32).bfloat16()
    expected = linear_reference(x, weight, None)
    torch.testing.assert_close(linear(x, layer), expected, atol=0.2, rtol=0)


def test_adapters_add_to_the_product() -> None:
    ones = LoraWeights({0: (LoraPart(torch.ones(1, 16), torch.ones(1, 8), 0),)}, 1)
    bank = LoraBank(0, StepAdapters(AdapterRows.of([(ones, 3)])))
    torch.manual_seed(0)
    x, layer = torch.randn(3, 16), pack(torch.randn(8, 16), None)
    expected = linear(x, layer) + x.sum(1, keepdim=True)
    torch.testing.assert_close(linear(x, Linear(layer.weight, bank)), expected)
