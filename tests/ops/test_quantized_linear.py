"""DeviceCodes: the layout of codes for a GPU stands for the same weight; what it does not take."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.far_device import FAR, FarDevice
from tokenmesh.kernels.capability import e4m3_problem
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.round import Rounding, rounded
from tokenmesh.kernels.quantized_linear import DeviceCodes, quantized_linear
from tokenmesh.kernels.quantized_linear.device_codes import lacks_e4m3

WEIGHT = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))


def codes_of(kind: str) -> Codes:
    """Return codes of WEIGHT or of its shape."""
    if kind in ("int8", "int4", "fp8"):
        to: Rounding = kind  # type: ignore[assignment]
        return rounded(WEIGHT, to)
    bits = {"five bits": 5, "six bits": 6}.get(kind, 4)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << bits, WEIGHT.shape, generator=generator).to(torch.uint8)
    scales = torch.rand(32, 6, generator=generator)
    codes = Codes(numbers, bits, scales, 16, offsets=-scales, center=1 << (bits - 1))
    if kind == "table":
        return replace(codes, kind="table", table=tuple(range(0, 160, 10)), center=80)
    return replace(codes, order=torch.randperm(96, generator=generator))


@pytest.mark.parametrize(
    "kind", ["int8", "int4", "fp8", "table", "four bits", "five bits", "six bits"]
)
def test_packed_codes_stand_for_the_same_weight(kind: str) -> None:
    codes = codes_of(kind)
    assert DeviceCodes.problem(codes) is None
    bias = torch.randn(32, generator=torch.Generator().manual_seed(1))
    packed = DeviceCodes.pack(codes, bias)
    expected = codes.decoded()
    in_order = expected if codes.order is None else expected[:, codes.order]
    torch.testing.assert_close(packed.decoded(), in_order)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2))
    found = quantized_linear(x, packed, x.dtype)
    product = torch.nn.functional.linear(x, expected, bias)
    torch.testing.assert_close(found, product, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scales_take_16_bits_where_they_are_such_numbers(dtype: torch.dtype) -> None:
    codes = rounded(WEIGHT, "int4")
    codes = replace(codes, scales=codes.scales.to(dtype).float())
    packed = DeviceCodes.pack(codes, None)
    assert packed.scales.dtype == dtype
    assert torch.equal(packed.decoded(), codes.decoded())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_activations_are_rounded_only_where_the_format_does_so(kind: str) -> None:
    codes = replace(codes_of(kind), rounds_inputs=False)
    packed = DeviceCodes.pack(codes, None)
    assert not packed.multiplies_codes(torch.float16)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).half()
    expected = x.double() @ codes.decoded().half().double().T
    found = quantized_linear(x, packed, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_gpu_without_fp8_is_named_and_decodes_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacks_e4m3.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    needed = "FP8 (E4M3) needs a GPU of compute capability 8.9, and NVIDIA A10 has 8.6"
    assert e4m3_problem(torch.device("cuda")) == needed
    assert e4m3_problem(torch.device("cpu")) is None
    codes = codes_of("fp8")
    with FarDevice():
        packed = DeviceCodes.pack(codes.to(FAR), None)
        assert packed.numbers.dtype == torch.uint8
        assert not packed.multiplies_codes(torch.float16)
        assert torch.equal(packed.decoded().cpu(), codes.decoded())
    assert needed in caplog.text
    lacks_e4m3.cache_clear()


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.01), ("fp8", 0.05)])
def test_rounded_activations_are_near_and_show_what_is_not_finite(kind: str, limit: float) -> None:
    codes = codes_of(kind)
    packed = DeviceCodes.pack(codes, None)
    assert packed.multiplies_codes(torch.float16)
    assert not packed.multiplies_codes(torch.float32)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).half()
    expected = x.float() @ codes.decoded().T
    found = quantized_linear(x, packed, torch.float32)
    assert 0 < (found - expected).norm() / expected.norm() < limit
    x[0, 5] = torch.inf
    found = quantized_linear(x, packed, torch.float32)
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


def test_what_no_kernel_takes_is_named() -> None:
    codes = rounded(WEIGHT, "int4")
    few = codes.rows(torch.arange(30))
    assert DeviceCodes.problem(few) == "30 outputs or 96 inputs are not multiples of 16"
    scales = codes.scales.repeat(1, 4)
    odd = replace(codes, scales=scales, group_size=8)
    assert DeviceCodes.problem(odd) == "groups of 8 inputs are not multiples of 16"
