"""Interpreter: a separate process in which `triton.jit` interprets.

Triton decides by the environment when it is imported, and a process that interprets cannot compile.
Importing this module must therefore import neither triton nor torch.
"""

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

VARIABLE = "TRITON_INTERPRET"


class Interpreter:
    """Calls functions where Triton interprets: in a child, or here when the variable is set."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """Call a module-level function; what it raises is raised here, with its traceback."""
        if os.environ.get(VARIABLE) == "1":
            _begin()
            with warnings.catch_warnings():
                warnings.simplefilter("default")  # as in a child: numpy warns of Triton 3.6
                return function(*arguments)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin)
        try:
            return self._pool.submit(function, *arguments).result(timeout_s)
        except BrokenProcessPool:
            self._pool = None  # the next case gets a new child
            raise

    def stop(self) -> None:
        """End the child, if there is one."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _begin() -> None:
    os.environ[VARIABLE] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.kernels.patch_once import patch_once

    patch_once()
