"""Every compilation for sm_90, without a GPU: registers, spills, shared memory, instructions."""

import os
import re

import pytest

from tests.kernels.interpreter import VARIABLE

pytest.importorskip("triton")

import triton

from tests.kernels.discovery import cases_module, compilation_cases, compilation_named, ops
from tests.kernels.sass import compile_for_hopper

CASES = list(compilation_cases())


def _first_of_its_op(index: int) -> bool:
    return index == 0 or CASES[index - 1][0] != CASES[index][0]


# ptxas takes minutes for all: `make test-kernels` runs them when a kernel has changed.
PARAMETERS = [
    pytest.param(*case, id="-".join(case), marks=() if _first_of_its_op(i) else pytest.mark.slow)
    for i, case in enumerate(CASES)
]
pytestmark = pytest.mark.skipif(
    os.environ.get(VARIABLE) == "1", reason="a process that interprets cannot compile"
)


@pytest.mark.timeout(120)  # ptxas takes seconds for the largest kernels
@pytest.mark.parametrize(("op", "name"), PARAMETERS)
def test_compiled_kernel_keeps_its_limits(op: str, name: str) -> None:
    compilation = compilation_named(op, name)
    machine = compile_for_hopper(compilation)
    limits = compilation.limits
    if tuple(map(int, triton.__version__.split(".")[:2])) < limits.oldest_triton:
        return  # what an older one needs is not recorded
    assert machine.registers <= limits.max_registers
    assert machine.shared_bytes <= limits.max_shared_bytes
    assert machine.count(r"LDL|STL") <= limits.max_spills
    for wanted in compilation.required:
        assert machine.count(wanted), f"no {wanted} in {sorted(set(machine.instructions))}"
    for unwanted in compilation.forbidden:
        assert not machine.count(unwanted), f"{unwanted} in the machine code"


@pytest.mark.parametrize("op", ops())
def test_op_has_cases_and_a_bfloat16_compilation(op: str) -> None:
    module = cases_module(op)
    names = [each.name for each in module.cases()]
    assert names
    assert len(set(names)) == len(names)
    types = " ".join(" ".join(each.signature.values()) for each in module.compilations())
    assert re.search(r"\*(bf16|i32|i64)", types)
