"""Paged attention in the interpreter on random rows, shapes and variants."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.kernels.cases.paged_attention import Case, case_of
from tests.kernels.checks import check

TYPES = st.sampled_from([torch.float32, torch.float16])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any step: short and long rows, empty and padded ones, any shape and variant."""
    group, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    start = st.integers(0, 70) | st.sampled_from([127, 128, 200, 300])
    row = st.tuples(start, st.integers(1, 5))
    padding = st.sampled_from([(-1, 1), (-3, 3), (7, 0)])
    short = draw(st.lists(row | padding, max_size=4))
    long = draw(st.lists(st.tuples(start, st.integers(1, 90)) | padding, max_size=3))
    if not short and not long:
        short = [draw(row)]
    return Case(
        "random",
        short=tuple(short),
        long=tuple(long),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 64, 80, 96, 128])),
        page_size=draw(st.sampled_from([8, 16, 64, 128])),
        window=draw(st.none() | st.integers(1, 200)),
        splits=draw(st.integers(1, 5)),
        softcap=draw(st.none() | st.sampled_from([2.0, 30.0])),
        has_sinks=draw(st.booleans()),
        pages_dtype=draw(st.sampled_from([None, torch.float8_e4m3fn])),
        scales=draw(st.sampled_from([(1.0, 1.0), (0.5, 1.5)])),
    )


def check_case(case: Case, dtype: torch.dtype) -> None:
    """For the interpreting child."""
    check(case_of(case), dtype, "cpu")


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=cases(), dtype=TYPES)
def test_random_step_equals_the_reference(
    case: Case, dtype: torch.dtype, interpreter: Interpreter
) -> None:
    interpreter.call(check_case, case, dtype, timeout_s=100)
