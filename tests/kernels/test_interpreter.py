"""Every case in Triton's interpreter, in float32 and float16, against its reference.

bfloat16 is left to the GPU: the interpreter computes it wrongly. To debug a kernel in one process:
TRITON_INTERPRET=1 pytest --pdb tests/kernels/test_interpreter.py -k rms_norm
"""

import pytest
import torch

from tests.kernels.interpreter import Interpreter

pytest.importorskip("triton")

from tests.kernels.checks import check_named
from tests.kernels.discovery import kernel_cases

CASES = list(kernel_cases((torch.float32, torch.float16)))
IN_FLOAT32 = {(op, name) for op, name, dtype in CASES if dtype == torch.float32}
FIRST = {op: name for op, name, _ in reversed(CASES)}
"""The case of each op that `make test` runs in float16 as well."""


def marks_of(op: str, name: str, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    is_repeated = dtype == torch.float16 and (op, name) in IN_FLOAT32 and name != FIRST[op]
    return [pytest.mark.slow] if is_repeated else []


PARAMS = [
    pytest.param(*case, marks=marks_of(*case), id=f"{op}-{name}-{str(dtype)[6:]}")
    for case in CASES
    for op, name, dtype in [case]
]


@pytest.mark.timeout(120)  # the first case waits for the child to import torch
@pytest.mark.parametrize(("op", "name", "dtype"), PARAMS)
def test_interpreted_kernel_equals_the_reference(
    op: str, name: str, dtype: torch.dtype, interpreter: Interpreter
) -> None:
    interpreter.call(check_named, op, name, dtype, "cpu", timeout_s=100)
