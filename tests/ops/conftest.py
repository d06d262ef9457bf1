"""Every test of an op runs on memory that starts as NaN, so an unwritten element is noticed."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from tests.ops.native import with_avx2


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """In this mode torch fills new memory with NaN (floats) or the largest number (integers)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of the C kernels: see `in_avx2`."""
    with with_avx2() if getattr(request, "param", "best") == "AVX2" else nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
