"""DeviceExperts: codes of all experts for a GPU stand for the same weights; what does not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
import torch

from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.dispatch import interpreted_on_cpu
from tokenmesh.kernels.linear.formats.round import Rounding, rounded
from tokenmesh.kernels.moe import DeviceExperts, ExpertsSpec, pack
from tokenmesh.kernels.moe.device_experts import Unfit

CPU: Final = torch.device("cpu")
EXPERTS: Final = 3
Change = Callable[[int, Codes], Codes]


def slices_of(to: Rounding, change: Change = lambda _expert, codes: codes) -> list[list[Codes]]:
    """Gate and up [32, 64] of each expert."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, 64, generator=generator) for _ in range(2 * EXPERTS)]
    codes = [rounded(each, to) for each in weights]
    pairs = zip(codes[::2], codes[1::2], strict=True)
    return [[change(e, each) for each in pair] for e, pair in enumerate(pairs)]


def shuffled(expert: int, codes: Codes) -> Codes:
    """Each expert's inputs in its own order; the first one's as they are."""
    generator = torch.Generator().manual_seed(expert)
    return replace(codes, order=torch.randperm(64, generator=generator) if expert else None)


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("change", [lambda _e, codes: codes, shuffled], ids=["plain", "ordered"])
def test_packed_experts_stand_for_the_same_weights(to: Rounding, change: Change) -> None:
    slices = slices_of(to, change)
    packed = DeviceExperts.pack(slices, EXPERTS, CPU)
    assert (packed.num_experts, packed.out_features, packed.in_features) == (EXPERTS, 64, 64)
    expected = torch.stack([torch.cat([each.decoded() for each in pair]) for pair in slices])
    torch.testing.assert_close(packed.decoded(), expected)


def regrouped(_expert: int, codes: Codes) -> Codes:
    return replace(codes, scales=codes.scales.repeat(1, 4), group_size=8)


def shifted(expert: int, codes: Codes) -> Codes:
    return replace(codes, center=expert)


def with_offsets(expert: int, codes: Codes) -> Codes:
    return replace(codes, offsets=codes.scales if expert else None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (regrouped, "groups of 8 inputs are not multiples of 16"),
        (shifted, "they do not all have one format"),
        (with_offsets, "they do not all have one format"),
    ],
)
def test_what_no_kernel_takes_is_named(change: Change, problem: str) -> None:
    with pytest.raises(Unfit, match=problem):
        DeviceExperts.pack(slices_of("int4", change), EXPERTS, CPU)
    with pytest.raises(Unfit, match="has no codes"):
        DeviceExperts.pack([None], EXPERTS, CPU)


def test_what_does_not_fit_is_decoded_and_named(caplog: pytest.LogCaptureFixture) -> None:
    first = slices_of("int4", regrouped)
    w13, w2 = torch.randn(EXPERTS, 64, 64), torch.randn(EXPERTS, 64, 32)
    with interpreted_on_cpu():
        found, second, _ = pack(w13, w2, ExpertsSpec(), codes=(lambda expert: first[expert], None))
    assert isinstance(found, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert "are decoded, which saves no memory: groups of 8 inputs are not" in caplog.text


def test_one_of_both_products_may_have_plain_weights() -> None:
    first = slices_of("int4")
    w13, w2 = torch.randn(EXPERTS, 64, 64), torch.randn(EXPERTS, 64, 32)
    with interpreted_on_cpu():
        found, second, _ = pack(w13, w2, ExpertsSpec(), codes=(lambda expert: first[expert], None))
    assert isinstance(found, DeviceExperts)
    assert isinstance(second, torch.Tensor)
