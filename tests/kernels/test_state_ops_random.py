"""causal_conv, gated_delta and mamba2 in the interpreter on random rows and shapes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.kernels.cases import causal_conv, gated_delta, mamba2
from tests.kernels.checks import check
from tests.rounds import counts

TYPES = st.sampled_from([torch.float32, torch.float16])
ROWS = st.lists(
    st.tuples(
        st.integers(0, 5) | st.sampled_from([8, 9, 63, 64, 65, 130]),
        st.integers(0, 3) | st.sampled_from([15, 16, 60, 63, 64, 65]),
    ),
    min_size=1,
    max_size=5,
)
"""Length and start of each."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Any]:
    """An op and one of its cases."""
    rows = draw(ROWS)
    lengths, starts = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    size, groups = st.sampled_from([16, 24, 40, 64]), draw(st.integers(1, 3))
    op = draw(st.sampled_from(["causal_conv", "gated_delta", "mamba2"]))
    if op == "causal_conv":
        width = draw(st.integers(1, 5))
        return op, causal_conv.Case(
            "random",
            lengths,
            starts,
            channels=16 * draw(st.integers(1, 20)),
            width=width,
            kept=width - 1 + draw(st.integers(0, 2)),
            has_bias=draw(st.booleans()),
            activation=draw(st.sampled_from([None, "silu"])),
        )
    heads = groups * draw(st.integers(1, 2))
    if op == "gated_delta":
        return op, gated_delta.Case(
            "random",
            lengths,
            starts,
            key_heads=groups,
            heads=heads,
            key_dim=2 * draw(st.sampled_from([8, 24, 32])),
            value_dim=2 * draw(st.sampled_from([8, 24, 32, 40])),
            has_channels=draw(st.booleans()),
        )
    shape: dict[str, Any] = {
        "dim": 2 * draw(size),
        "size": 2 * draw(size),
        "has_parts": draw(st.booleans()),
    }
    return op, mamba2.Case("random", lengths, starts, heads=heads, groups=groups, **shape)


def check_case(op: str, case: Any, dtype: torch.dtype) -> None:
    """For the interpreting child."""
    module: Any = {"causal_conv": causal_conv, "gated_delta": gated_delta, "mamba2": mamba2}[op]
    check(module.case_of(case), dtype, "cpu")


@pytest.mark.timeout(300)
@counts("num_examples", 8, 40)
def test_random_rows_equal_the_reference(num_examples: int, interpreter: Interpreter) -> None:
    @settings(max_examples=num_examples, deadline=None)
    @given(case=cases(), dtype=TYPES)
    def check_random(case: tuple[str, Any], dtype: torch.dtype) -> None:
        interpreter.call(check_case, *case, dtype, timeout_s=100)

    check_random()
