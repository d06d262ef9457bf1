"""Every test of an op runs on memory that starts as NaN, so an unwritten element is noticed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """In this mode torch fills new memory with NaN (floats) or the largest number (integers)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
