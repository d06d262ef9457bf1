"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """One interpreting process for all tests of the session."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.stop()
