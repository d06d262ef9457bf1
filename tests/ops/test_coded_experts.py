"""Experts as codes, in C: right on odd shapes, the same bits for any batch."""

from dataclasses import replace
from typing import Final

import pytest
import torch

from tests.ops.native import in_avx2, in_avx2_too_slowly, needs_native
from tests.ops.test_moe import SPECS, Layer, layer
from tests.ops.test_native_codes import ROUNDED
from tests.ops.test_routed import Layer as RoutedLayer
from tests.ops.test_routed import layer as routed_layer
from tests.ops.test_routed import run, tokens
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.round import Rounding, rounded
from tokenmesh.kernels.moe import ExpertsSpec, Routing, Weights, experts, pack, slices_of, weight_of
from tokenmesh.kernels.native import CodedExperts, NativeCodes, NativeExperts

pytestmark = needs_native

SIZES: Final = (7, 3, 5, 64, 96)
"""Tokens, experts of a token, experts, hidden, inner: groups of 32 divide them."""
Packed = tuple[Weights, Weights, ExpertsSpec]
ROUNDINGS: Final[tuple[Rounding, ...]] = ("int8", "int4", "fp8")


def six_bits(weight: torch.Tensor) -> Codes:
    """Groups of 16 with offsets, in another order, as no rounding makes them."""
    outputs, inputs = weight.shape
    numbers = torch.randint(0, 64, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // 16) * 0.01 + 1e-3
    return Codes(numbers, 6, scales, 16, torch.randn(scales.shape) * 0.02, center=32)


def coded(own: Layer, kind: str, parts: tuple[bool, bool] = (True, True)) -> tuple[Layer, Packed]:
    """The layer with the numbers of its codes, and what it is packed into; parts: that have any."""
    w13, w2, spec = own.w13.clone(), own.w2.clone(), own.spec
    made: dict[tuple[int, int], list[Codes]] = {}
    for expert in range(len(w2)):
        slices = slices_of(w13, expert, spec), (weight_of(w2, expert, spec),)
        for number, weights in enumerate(slices):
            if not parts[number]:
                continue
            codes = []
            for each in weights:
                straight = each.contiguous()
                found = six_bits(straight) if kind == "six" else rounded(straight, kind)  # type: ignore[arg-type]
                each.copy_(found.decoded())
                codes.append(found)
            made[number, expert] = codes
    readers = [
        (lambda expert, number=number: made[number, expert]) if parts[number] else None
        for number in (0, 1)
    ]
    packed = pack(w13, w2, spec, True, (readers[0], readers[1]))
    return replace(own, w13=w13, w2=w2), packed


def check(own: Layer, packed: Packed, limit: float) -> torch.Tensor:
    actual = experts(own.x, own.ids, own.weights, *packed)
    expected = replace(own, x=own.x.float()).expected()
    assert actual.dtype == own.x.dtype
    error = float((actual.float() - expected).norm() / expected.norm())
    assert error < limit, error
    return actual


@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("kind", [*ROUNDINGS, "six"])
@in_avx2_too_slowly
def test_products_in_float32_are_those_of_the_decoded_weights(kind: str, name: str) -> None:
    own, packed = coded(layer(SPECS[name], sizes=SIZES), kind)
    assert all(isinstance(each, CodedExperts) for each in packed[:2])
    check(own, packed, 3e-6)


@pytest.mark.parametrize("kind", [*ROUNDINGS, "six"])
@in_avx2
def test_products_in_bfloat16_are_within_the_rounding_of_activations(kind: str) -> None:
    if kind == "fp8" and not NativeCodes.fits(rounded(torch.randn(4, 64), "fp8"), is_exact=False):
        pytest.skip("this processor has no AVX-512 VBMI")
    own, packed = coded(layer(SPECS["silu"], torch.bfloat16, SIZES), kind)
    check(replace(own, w13=own.w13.float(), w2=own.w2.float()), packed, 2 * ROUNDED)


@pytest.mark.parametrize("parts", [(True, False), (False, True)], ids=["first", "second"])
def test_one_of_both_products_may_have_plain_weights(parts: tuple[bool, bool]) -> None:
    own, packed = coded(layer(SPECS["silu"], sizes=SIZES), "int4", parts)
    kinds = [CodedExperts if each else NativeExperts for each in parts]
    assert [type(each) for each in packed[:2]] == kinds
    check(own, packed, 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@in_avx2
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    sizes = (150, 2, 33, 64, 96)
    own, packed = coded(layer(SPECS["silu"], dtype, sizes), "int4")
    whole = experts(own.x, own.ids, own.weights, *packed)
    for some in (slice(0, 1), slice(3, 10), slice(20, 150)):
        part = experts(own.x[some], own.ids[some], own.weights[some], *packed)
        assert torch.equal(part, whole[some])


def test_an_expert_without_codes_leaves_its_stack_plain() -> None:
    own = layer(SPECS["silu"], sizes=SIZES)
    codes = [[rounded(each, "int8") for each in slices_of(own.w13, e, own.spec)] for e in range(5)]
    readers = (lambda e: codes[e] if e != 4 else None), None
    packed = pack(own.w13.clone(), own.w2.clone(), own.spec, True, readers)
    assert all(isinstance(each, NativeExperts) for each in packed[:2])
    check(own, packed, 3e-6)


def test_adapters_multiply_one_expert_at_a_time() -> None:
    own, (w13, w2, _) = coded(layer(SPECS["silu"], sizes=SIZES), "int4")
    for weights, stack in ((w13, own.w13), (w2, own.w2)):
        assert isinstance(weights, CodedExperts)
        x = torch.randn(3, stack.shape[2])
        for expert in (0, 4):
            torch.testing.assert_close(
                weights.product(expert, x), x @ stack[expert].t(), atol=1e-4, rtol=1e-4
            )


def test_an_id_that_is_not_an_experts_is_refused() -> None:
    own, packed = coded(layer(SPECS["silu"], sizes=SIZES), "int8")
    with pytest.raises(IndexError, match="not from -1 to 5"):
        experts(own.x, torch.full_like(own.ids, 6), own.weights, *packed)


class CodedLayer(RoutedLayer):
    """A layer whose program has codes."""

    def packed(self) -> Packed:
        def first(expert: int) -> list[Codes]:
            return [rounded(each, "int8") for each in self.w13[expert].chunk(2)]

        def second(expert: int) -> list[Codes]:
            return [rounded(self.w2[expert], "int8")]

        return pack(self.w13.clone(), self.w2.clone(), self.spec, True, (first, second))


@pytest.mark.parametrize("count", [1, 33])
@in_avx2
def test_a_program_runs_them(count: int) -> None:
    plain = routed_layer(torch.float32, torch.float32, has_biases=True)
    for stack in (plain.w13, plain.w2):
        for expert in stack:
            for each in expert.chunk(2) if stack is plain.w13 else (expert,):
                each.copy_(rounded(each, "int8").decoded())
    own = CodedLayer(plain.router, plain.bias, plain.correction, plain.w13, plain.w2, plain.spec)
    routing = Routing(top_k=3, scores="softmax")
    x = tokens(count, torch.float32)
    actual, expected = run(own.program(routing), x), own.expected(x, routing)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
