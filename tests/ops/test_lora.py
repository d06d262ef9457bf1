"""The op `lora`: right in torch and in C, and in C the same bits with any other tokens."""

import pytest
import torch

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels.linear import linear, pack
from tokenmesh.kernels.lora import (
    TOLERANCE,
    AdapterRows,
    LoraBank,
    LoraPart,
    LoraWeights,
    StepAdapters,
    add_lora,
    lora_reference,
)
from tokenmesh.kernels.lora.cpu import add_in_torch, add_lora_on_cpu

INPUTS, OUTPUTS, TOKENS = 50, 70, 23
RANKS = (1, 3, 8, 17, 64)
DTYPES = [torch.float32, torch.bfloat16]


def adapter(rank: int, dtype: torch.dtype, number: int = 0) -> LoraWeights:
    """Two parts of a merged layer, of different ranks."""
    generator = torch.Generator().manual_seed(rank)

    def part(rank: int, first: int, outputs: int) -> LoraPart:
        a = torch.randn(rank, INPUTS, generator=generator) / INPUTS**0.5
        b = torch.randn(rank, outputs, generator=generator) / rank**0.5
        return LoraPart(a.to(dtype), b.to(dtype), first)

    return LoraWeights({number: (part(rank, 0, 37), part(rank + 1, 40, 30))}, number + 1)


def step(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, AdapterRows]:
    """Rows of different lengths, some of them without an adapter, two with the same one."""
    torch.manual_seed(0)
    x, out = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(TOKENS, OUTPUTS).to(dtype)
    weights = [adapter(rank, dtype) for rank in RANKS]
    counts = (1, 1, 5, 1, 9, 2, 4)
    order = (weights[0], None, weights[1], weights[2], weights[3], weights[4], weights[1])
    rows = AdapterRows.of(list(zip(order, counts, strict=True)))
    assert rows is not None
    return x, out, rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("add", [add_in_torch, add_lora_on_cpu], ids=["torch", "native"])
def test_it_equals_the_reference(dtype: torch.dtype, add: object) -> None:
    x, out, rows = step(dtype)
    expected = lora_reference(x, out, 0, rows)
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    add(x, out, 0, rows)  # type: ignore[operator]
    torch.testing.assert_close(out, expected, atol=limit, rtol=0)


@needs_native
@in_avx2
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    x, out, rows = step(dtype)
    whole = out.clone()
    add_lora_on_cpu(x, whole, 0, rows)
    for each, tokens in zip(rows.adapters, rows.tokens, strict=True):
        for token in tokens:
            alone = out[token : token + 1].clone()
            add_lora_on_cpu(x[token : token + 1], alone, 0, AdapterRows((each,), ((0,),)))
            assert torch.equal(alone[0], whole[token])


@needs_native
@in_avx2
def test_a_wide_result_of_narrow_inputs_is_not_rounded() -> None:
    x, out, rows = step(torch.bfloat16)
    wide = out.float()
    add_lora_on_cpu(x, wide, 0, rows)
    torch.testing.assert_close(wide, lora_reference(x, out.float(), 0, rows), atol=1e-3, rtol=0)


def test_a_linear_layer_adds_what_the_step_at_work_has() -> None:
    x, _, rows = step(torch.float32)
    current = StepAdapters()
    layer = pack(torch.randn(OUTPUTS, INPUTS), None)
    plain = linear(x, layer)
    layer.adapters = LoraBank(0, current)
    assert torch.equal(linear(x, layer), plain)
    current.rows = rows
    expected = lora_reference(x, plain, 0, rows)
    torch.testing.assert_close(linear(x, layer), expected, atol=1e-4, rtol=0)
    other = LoraBank(3, current)
    assert torch.equal(add_lora(x, plain.clone(), other), plain)


def test_rows_without_an_adapter_are_no_rows() -> None:
    assert AdapterRows.of([(None, 3), (None, 1)]) is None
    one = adapter(2, torch.float32)
    rows = AdapterRows.of([(None, 3), (one, 2), (None, 1), (one, 1)])
    assert rows is not None
    assert (rows.adapters, rows.tokens) == ((one,), ([3, 4, 6],))
