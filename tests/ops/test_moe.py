"""Experts on the CPU against their reference, by torch and by the C kernels."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.native import in_avx2, in_avx2_too_slowly, needs_native
from tokenmesh.kernels.moe import (
    ACTIVATIONS,
    TOLERANCE,
    ExpertsSpec,
    experts,
    experts_reference,
    pack,
)
from tokenmesh.kernels.moe.cpu import MAX_PAIRS
from tokenmesh.kernels.native import NativeExperts

DTYPES = [torch.float32, torch.bfloat16]
WAYS = [pytest.param(False, id="torch"), pytest.param(True, id="native", marks=needs_native)]
SPECS = {
    "silu": ExpertsSpec(),
    "gelu": ExpertsSpec(activation="gelu"),
    "gelu_tanh": ExpertsSpec(activation="gelu_tanh"),
    "relu2-no-gate": ExpertsSpec(activation="relu2", is_gated=False),
    "silu-no-gate-transposed": ExpertsSpec(is_gated=False, is_transposed=True),
    "gpt_oss": ExpertsSpec(
        alpha=1.702, limit=1.1, up_offset=1.0, is_interleaved=True, is_transposed=True
    ),
    "limit": ExpertsSpec(limit=0.9),
    "limit-after": ExpertsSpec(limit=0.4, limits_activated_gate=True),
    "relu-interleaved": ExpertsSpec(activation="relu", is_interleaved=True),
}


@dataclass(frozen=True)
class Layer:
    """Random experts and the tokens for them."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    spec: ExpertsSpec

    def expected(self) -> torch.Tensor:
        return experts_reference(self.x, self.ids, self.weights, self.w13, self.w2, self.spec)

    def check(self, native: bool) -> torch.Tensor:
        """Hold the op against the reference; returns its result."""
        packed = pack(self.w13.clone(), self.w2.clone(), self.spec, native)
        assert isinstance(packed[0], NativeExperts) == native
        actual, expected = experts(self.x, self.ids, self.weights, *packed), self.expected()
        assert actual.dtype == self.x.dtype
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        limit = TOLERANCE[self.x.dtype] * max(1.0, largest)
        torch.testing.assert_close(actual, expected, atol=limit, rtol=0)
        return actual


def layer(
    spec: ExpertsSpec,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int, int, int] = (7, 3, 5, 34, 70),
    has_bias: bool = True,
) -> Layer:
    """sizes: tokens, experts of a token, experts, hidden, inner."""
    tokens, top_k, num_experts, hidden, inner = sizes
    torch.manual_seed(0)
    rows = inner * (2 if spec.is_gated else 1)
    w13 = torch.randn(num_experts, rows, hidden).mul(2 * hidden**-0.5).to(dtype)
    w2 = torch.randn(num_experts, hidden, inner).mul(inner**-0.5).to(dtype)
    if spec.is_transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    if has_bias:
        b13, b2 = torch.randn(num_experts, rows), torch.randn(num_experts, hidden)
        spec = replace(spec, b13=b13.to(dtype), b2=b2.to(dtype))
    return Layer(
        torch.randn(tokens, hidden).to(dtype),
        torch.randint(-1, num_experts + 1, (tokens, top_k)),
        torch.rand(tokens, top_k),
        w13,
        w2,
        spec,
    )


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", sorted(SPECS))
@in_avx2_too_slowly
def test_moe_equals_the_reference(
    name: str, has_bias: bool, dtype: torch.dtype, native: bool
) -> None:
    layer(SPECS[name], dtype, has_bias=has_bias).check(native)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("native", WAYS)
@in_avx2
def test_moe_activations_keep_large_numbers_and_nan(activation: str, native: bool) -> None:
    """x goes through both products as it is, with and without a gate of the same number."""
    numbers = torch.tensor([-200.0, -90, -20, -1, -1e-3, 0, 1e-3, 1, 20, 90, 200, torch.nan])
    one = torch.ones(1, 1, 1)
    for is_gated in (False, True):
        spec = ExpertsSpec(activation=activation, is_gated=is_gated)  # type: ignore[arg-type]
        w13 = torch.ones(1, 2, 1) if is_gated else one
        x, ids = numbers[:, None], torch.zeros(len(numbers), 1, dtype=torch.int64)
        weights = torch.ones(len(numbers), 1)
        actual = experts(x, ids, weights, *pack(w13, one, spec, native))
        expected = experts_reference(x, ids, weights, w13, one, spec)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5, equal_nan=True)


@needs_native
@settings(max_examples=60)
@given(
    sizes=st.tuples(
        st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.integers(1, 70),
        st.integers(1, 70),
    ),
    name=st.sampled_from(sorted(SPECS)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)  # fmt: skip
@in_avx2_too_slowly
def test_moe_of_any_shape_equals_the_reference(
    sizes: tuple[int, int, int, int, int], name: str, dtype: torch.dtype, has_bias: bool
) -> None:
    case = layer(SPECS[name], dtype, sizes, has_bias)
    case.check(native=False)
    if dtype == torch.float32 or sizes[3] % 2 == sizes[4] % 2 == 0:
        case.check(native=True)


@pytest.mark.parametrize("native", WAYS)
def test_moe_without_tokens_or_without_experts_here(native: bool) -> None:
    case = layer(ExpertsSpec(), sizes=(0, 2, 3, 8, 8))
    assert case.check(native).shape == (0, 8)
    case = layer(ExpertsSpec(), sizes=(3, 2, 3, 8, 8))
    nowhere = replace(case, ids=torch.tensor([[-1, 3], [3, 3], [-1, -1]]))
    assert torch.equal(nowhere.check(native), torch.zeros(3, 8))


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[2, 2, 2]] * 30, id="all-on-one-expert"),
        pytest.param([[1, 1, 4], [0, 0, 0], [4, 1, 4]], id="twice-in-a-row"),
        pytest.param([[0, 2, 3], [3, 0, 2]], id="experts-without-tokens"),
    ],
)
@in_avx2
def test_moe_of_uneven_experts(ids: list[list[int]], native: bool) -> None:
    case = layer(SPECS["gpt_oss"], sizes=(len(ids), 3, 5, 32, 40))
    replace(case, ids=torch.tensor(ids)).check(native)


@pytest.mark.parametrize("native", WAYS)
def test_moe_adds_nothing_of_an_expert_that_is_absent(native: bool) -> None:
    """Not even the NaN of its weight."""
    case = layer(ExpertsSpec(), sizes=(2, 2, 3, 8, 8))
    weights = torch.tensor([[0.5, torch.nan], [torch.nan, 0.25]])
    both = replace(case, ids=torch.tensor([[1, 3], [-1, 2]]), weights=weights).check(native)
    ids = torch.tensor([[1], [2]])
    alone = replace(case, ids=ids, weights=torch.tensor([[0.5], [0.25]])).check(native)
    torch.testing.assert_close(both, alone, atol=0, rtol=0)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("wrong", [-2, 4])
def test_moe_refuses_an_id_that_is_out_of_range(wrong: int, native: bool) -> None:
    case = layer(ExpertsSpec(), sizes=(2, 2, 3, 8, 8))
    ids = torch.tensor([[0, 1], [wrong, 2]])
    with pytest.raises(IndexError, match="from -1 to 3"):
        experts(case.x, ids, case.weights, *pack(case.w13, case.w2, case.spec, native))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "relu2-no-gate"])
@in_avx2
def test_a_token_of_the_native_moe_has_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype
) -> None:
    case = layer(SPECS[name], dtype, sizes=(50, 3, 4, 130, 66))
    packed = pack(case.w13, case.w2, case.spec, native=True)
    whole = experts(case.x, case.ids, case.weights, *packed)
    for first, count in ((0, 1), (49, 1), (3, 5), (7, 13), (10, 40)):
        part = slice(first, first + count)
        alone = experts(case.x[part], case.ids[part], case.weights[part], *packed)
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize("native", WAYS)
def test_moe_of_more_pairs_than_it_takes_at_once(native: bool) -> None:
    case = layer(ExpertsSpec(), sizes=(MAX_PAIRS // 2 + 3, 2, 3, 4, 4), has_bias=False)
    case.check(native)


@pytest.mark.parametrize("native", WAYS)
def test_moe_takes_rows_apart_and_weights_of_other_types(native: bool) -> None:
    case = layer(ExpertsSpec(), torch.bfloat16)
    wide = torch.randn(7, 3, 34).bfloat16()
    replace(case, x=wide[:, 1], weights=case.weights.bfloat16()).check(native)
    turned = replace(case, x=torch.randn(34, 7).bfloat16().t(), ids=case.ids.t().contiguous().t())
    turned.check(native)


def test_float16_experts_run_by_torch() -> None:
    case = layer(SPECS["gpt_oss"], torch.float16)
    packed = pack(case.w13, case.w2, case.spec, native=True)
    assert packed[0] is case.w13
    case.check(native=False)


def test_experts_that_do_not_fit_together_are_refused() -> None:
    w13, w2 = torch.zeros(2, 8, 6), torch.zeros(2, 6, 4)
    pack(w13, w2, ExpertsSpec())
    for wrong in (ExpertsSpec(is_gated=False), ExpertsSpec(is_transposed=True)):
        with pytest.raises(ValueError, match="do not fit"):
            pack(w13, w2, wrong)
    with pytest.raises(ValueError, match="bias"):
        pack(w13, w2, ExpertsSpec(b13=torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="bias"):
        pack(w13, w2, ExpertsSpec(b2=torch.zeros(3, 6)))


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="'swish'"):
        ExpertsSpec(activation="swish")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alpha belongs to silu"):
        ExpertsSpec(activation="relu", alpha=2.0)
    with pytest.raises(ValueError, match="gated experts"):
        ExpertsSpec(is_gated=False, limit=7.0)
    with pytest.raises(ValueError, match="not above 0"):
        ExpertsSpec(limit=0.0)
