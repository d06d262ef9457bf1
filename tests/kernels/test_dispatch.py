"""Where an op runs, and what it does without Triton or without alignment."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmesh.kernels.alignment import assert_aligned_rows, padded

WITHOUT_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
import tokenmesh.kernels
for module in pkgutil.iter_modules(tokenmesh.kernels.__path__):
    importlib.import_module(f"tokenmesh.kernels.{module.name}")
import tokenmesh.services.worker_svc.main
from tokenmesh.kernels.rms_norm import add_rms_norm
print(add_rms_norm(torch.ones(1, 4), torch.ones(1, 4), torch.ones(4), 0.0).tolist())
"""


@pytest.mark.timeout(120)  # imports torch on a loaded machine
def test_a_machine_without_triton_imports_all_ops_and_runs_on_its_cpu() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[[1.0, 1.0, 1.0, 1.0]]\n"


def laid_out(shape: tuple[int, ...], strides: tuple[int, ...], address: int = 256) -> Any:
    """As much of a tensor as the check looks at."""
    return SimpleNamespace(
        shape=shape,
        data_ptr=lambda: address,
        stride=lambda dim=None: strides if dim is None else strides[dim],
    )


@pytest.mark.parametrize(
    "tensor",
    [
        laid_out((3, 40), (48, 1)),
        laid_out((1, 33), (33, 1)),
        laid_out((3, 7, 16), (112, 16, 1)),
        laid_out((3, 1, 16), (16, 5, 1)),
    ],
)
def test_aligned_rows_are_taken(tensor: Any) -> None:
    assert_aligned_rows(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        laid_out((3, 40), (40, 1)),
        laid_out((3, 40), (48, 2)),
        laid_out((3, 40), (48, 1), address=264),
        laid_out((3, 7, 8), (64, 8, 1)),
    ],
)
def test_rows_that_would_lose_wide_loads_are_refused(tensor: Any) -> None:
    with pytest.raises(AssertionError):
        assert_aligned_rows(tensor)


@pytest.mark.parametrize(("length", "width"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_padded_is_the_next_multiple(length: int, width: int) -> None:
    assert padded(length) == width
