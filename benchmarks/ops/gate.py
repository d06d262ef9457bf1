"""No number without a proof: an op is measured only when its tests pass and its result is right."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from benchmarks.ops.work import Work

_ROOT: Final = Path(__file__).resolve().parents[2]
_NO_TEST: Final = 5
"""pytest's answer when nothing was collected."""
MAX_REFERENCE_WORK: Final = 1 << 31
"""Products beyond which the specification would take minutes; torch's way is the measure then."""

Execute = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class RedTests(Exception):
    """The op may not be measured; the message says why."""


def execute(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command in the root of the repository."""
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)


def require_green(op: str, device: torch.device, run: Execute = execute) -> None:
    """Run the op's tests; on a GPU its kernels' cases there as well. Raises RedTests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", op, "-p", "no:cacheprovider"]
    done = [run([*command, "-m", "not gpu and not slow", "tests/ops"])]
    if device.type == "cuda" and find_spec(f"tokenmesh.kernels.{op}.triton"):
        done.append(run([*command, "-m", "gpu", "tests/kernels"]))
    for each in done:
        if each.returncode not in (0, _NO_TEST):
            raise RedTests(f"the tests of {op} fail:\n{(each.stdout + each.stderr)[-2000:]}")
    # an op with nothing but Triton kernels has tests in tests/kernels only; cuBLAS has none there
    if done[-1].returncode == _NO_TEST:
        raise RedTests(f"{op} has no tests for this device")


def require_right(name: str, work: Work) -> None:
    """Compare what is about to be timed, on its own inputs. Raises RedTests."""
    is_affordable = work.num_flops <= MAX_REFERENCE_WORK
    against = work.reference if is_affordable or work.torch_way is None else work.torch_way
    actual = work.run().clone()
    try:
        torch.testing.assert_close(
            actual.double(), against().double(), atol=work.tolerance, rtol=work.tolerance
        )
    except AssertionError as error:
        raise RedTests(f"{name} is wrong: {error}") from error
