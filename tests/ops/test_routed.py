"""Routing by torch, and with the experts as one operation of a C program."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from tests.ops.native import in_avx2, needs_native
from tokenmesh.kernels.moe import (
    SCORES,
    TOLERANCE,
    ExpertsSpec,
    Routing,
    Weights,
    experts_reference,
    pack,
    route,
    routed,
)
from tokenmesh.kernels.native import (
    AnyExperts,
    Kind,
    NativeWeight,
    Op,
    Program,
    ProgramInputs,
    ProgramModel,
)

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, INNER, NUM_EXPERTS = 34, 70, 19
ROUTINGS = [
    Routing(top_k=3, scores=scores, is_normalized=is_normalized, scale=scale)
    for scores in SCORES
    for is_normalized, scale in ((False, 1.0), (True, 2.5))
]
NAMES = [f"{each.scores}-{each.scale}" for each in ROUTINGS]


@dataclass(frozen=True)
class Layer:
    """A router and experts of random weights; logits are far apart."""

    router: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    w13: torch.Tensor
    w2: torch.Tensor
    spec: ExpertsSpec

    def expected(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        dtype = self.router.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = functional.linear(x.to(dtype), self.router, bias)
        ids, weights = route(logits, self.correction, routing)
        return experts_reference(x, ids, weights, self.w13, self.w2, self.spec)

    def packed(self) -> tuple[Weights, Weights, ExpertsSpec]:
        return pack(self.w13.clone(), self.w2.clone(), self.spec, True)

    def program(self, routing: Routing) -> Program:
        w13, w2, spec = self.packed()
        assert isinstance(w13, AnyExperts)
        assert isinstance(w2, AnyExperts)
        own = routed(
            NativeWeight.pack(self.router, self.bias), self.correction, routing, w13, w2, spec
        )
        model = ProgramModel(
            is_bf16=self.w13.dtype == torch.bfloat16, heads=1, kv_heads=1, head_dim=16
        )
        op = Op(kind=Kind.EXPERTS, source=0, target=0, weight=own.address)
        return Program(model, [op], [HIDDEN], [], [own])


def layer(dtype: torch.dtype, router: torch.dtype, has_biases: bool) -> Layer:
    torch.manual_seed(0)
    w13 = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN).mul(2 * HIDDEN**-0.5).to(dtype)
    w2 = torch.randn(NUM_EXPERTS, HIDDEN, INNER).mul(INNER**-0.5).to(dtype)
    weight = torch.randn(NUM_EXPERTS, HIDDEN).mul(2 * HIDDEN**-0.5).to(router)
    if not has_biases:
        return Layer(weight, None, None, w13, w2, ExpertsSpec())
    spec = ExpertsSpec(
        b13=torch.randn(NUM_EXPERTS, 2 * INNER).to(dtype),
        b2=torch.randn(NUM_EXPERTS, HIDDEN).to(dtype),
    )
    bias, correction = torch.randn(NUM_EXPERTS), torch.randn(NUM_EXPERTS)
    return Layer(weight, bias, correction, w13, w2, spec)


def run(program: Program, x: torch.Tensor) -> torch.Tensor:
    """Run the experts on x."""
    hidden, count = x.clone(), len(x)
    inputs = ProgramInputs(
        starts=[0] * count,
        counts=[1] * count,
        numbers=[0] * count,
        tables=[torch.zeros(1, 1, dtype=torch.int64)],
        turns=[],
        query_scale=None,
    )
    program.run(hidden, inputs, torch.zeros(1, 2, 1, 1, 16, 16, dtype=x.dtype))
    return hidden


def tokens(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@needs_native
@in_avx2
@pytest.mark.parametrize("has_biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize(
    ("dtype", "router"),
    [*((each, each) for each in DTYPES), (torch.bfloat16, torch.float32)],
    ids=["float32", "bfloat16", "wide"],
)
@pytest.mark.parametrize("routing", ROUTINGS, ids=NAMES)
def test_the_operation_equals_the_reference(
    routing: Routing, dtype: torch.dtype, router: torch.dtype, has_biases: bool
) -> None:
    own = layer(dtype, router, has_biases)
    x = tokens(33, dtype)
    actual, expected = run(own.program(routing), x), own.expected(x, routing)
    # the product that rounds may round otherwise, and then a token takes another expert
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    is_far = ((actual - expected).abs() > limit).any(dim=1)
    assert int(is_far.sum()) <= (3 if router == torch.bfloat16 else 0)


@needs_native
@in_avx2
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    own, routing = layer(dtype, torch.float32, True), Routing(top_k=3, scores="sigmoid")
    program = own.program(routing)
    x = tokens(1500, dtype)  # more pairs than the operation takes at once
    together = run(program, x)
    for first, last in ((0, 1), (7, 20), (1364, 1367), (1490, 1500)):
        assert torch.equal(run(program, x[first:last]), together[first:last])
    expected = own.expected(x[1360:1370], routing)
    limit = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(together[1360:1370], expected, atol=limit, rtol=0)


@needs_native
@in_avx2
def test_equal_scores_choose_the_experts_of_the_lowest_numbers() -> None:
    own = layer(torch.float32, torch.float32, False)
    own.router.zero_()
    x, routing = tokens(5, torch.float32), Routing(top_k=2, scores="softmax", is_normalized=True)
    ids, weights = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    expected = experts_reference(x, ids, weights, own.w13, own.w2, own.spec)
    torch.testing.assert_close(run(own.program(routing), x), expected, atol=1e-4, rtol=0)


@needs_native
@in_avx2
def test_tokens_that_are_nan_stay_nan_and_leave_the_others_unchanged() -> None:
    own = layer(torch.float32, torch.float32, True)
    x = tokens(3, torch.float32)
    program = own.program(ROUTINGS[0])
    alone = run(program, x)
    x[1] = torch.nan
    made = run(program, x)
    assert made[1].isnan().all()
    assert torch.equal(made[::2], alone[::2])


def test_corrections_change_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    correction = torch.tensor([0.0, 0.0, 5.0, 0.0])
    ids, weights = route(logits, correction, Routing(top_k=2, scores="sigmoid"))
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_normalized_weights_of_softmax_are_the_softmax_of_those_chosen() -> None:
    logits = torch.randn(9, 12)
    _, weights = route(logits, None, Routing(top_k=3, scores="softmax", is_normalized=True))
    torch.testing.assert_close(weights, logits.topk(3).values.softmax(-1))


@pytest.mark.parametrize("values", [{"top_k": 0}, {"scores": "tanh"}])
def test_a_routing_that_contradicts_itself_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Routing(**{"top_k": 1, "scores": "softmax", **values})  # type: ignore[arg-type]
