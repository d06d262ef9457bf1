"""check: one case of an op held against its reference, on any device."""

import torch

from tests.kernels.case import Inputs, KernelCase
from tests.kernels.discovery import case_named
from tests.kernels.guarded import Guarded, GuardedMemory


def check_named(op: str, name: str, dtype: torch.dtype, device: str) -> None:
    """Look the case up in this process, and check it."""
    check(case_named(op, name), dtype, device)


def check(case: KernelCase, dtype: torch.dtype, device: str) -> None:
    """Run the case; AssertionError when it is wrong anywhere or writes where it may not."""
    expected = case.reference(inputs_of(case, dtype, device))
    guarded = Guarded(inputs_of(case, dtype, device))
    with GuardedMemory() as memory:
        actual = case.run(guarded.inputs)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        _assert_close(actual[key], value, case.tolerance[dtype], key)
    guarded.assert_untouched(written=set(expected))
    memory.assert_untouched()


def inputs_of(case: KernelCase, dtype: torch.dtype, device: str) -> Inputs:
    """The same at each call."""
    where = torch.device(device)
    return case.make(dtype, where, torch.Generator(where).manual_seed(0))


def _assert_close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str
) -> None:
    assert actual.dtype == expected.dtype, f"{name} is {actual.dtype}, not {expected.dtype}"
    if expected.is_floating_point():
        actual, expected = actual.double(), expected.double()
    else:
        tolerance = 0
    torch.testing.assert_close(
        actual,
        expected,
        atol=tolerance,
        rtol=tolerance,
        equal_nan=True,  # what an op has to leave alone may hold anything
        msg=lambda text: f"{name}: {text}",
    )
