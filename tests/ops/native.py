"""Fixtures and marks that tests of the C kernels share."""

import ctypes
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from tokenmesh.kernels.native import build, has_started, start

FOLDER = Path("~/.cache/tokenmesh/kernels")

needs_native = pytest.mark.skipif(
    not start(3, 20, FOLDER), reason="no AVX2 or no C compiler: there are no C kernels here"
)
"""With more threads than most test machines have cores: some are always put aside."""

# the package's name for the module is the function's
_process = import_module("tokenmesh.kernels.native.start")._process


def _avx2() -> ctypes.CDLL | None:
    """The kernels of a processor without AVX-512, with threads of their own."""
    if not has_started():
        return None
    kernels = ctypes.CDLL(str(build.compiled(FOLDER.expanduser(), "AVX2")))
    kernels.tm_pool_start(3, ctypes.c_long(20_000))
    return kernels


_AVX2 = _avx2()
_LEVELS = ["best", pytest.param("AVX2", marks=needs_native)]
_SLOW_LEVELS = ["best", pytest.param("AVX2", marks=[needs_native, pytest.mark.slow])]
in_avx2 = pytest.mark.parametrize("instructions", _LEVELS, indirect=True)
"""Also as processors without AVX-512 compute it."""
in_avx2_too_slowly = pytest.mark.parametrize("instructions", _SLOW_LEVELS, indirect=True)
WAYS = [pytest.param(False, id="torch"), pytest.param(True, id="native", marks=needs_native)]


def with_avx2() -> AbstractContextManager[object]:
    """Within it the kernels are those of a processor without AVX-512."""
    return patch.object(_process, "kernels", _AVX2)


def way(cpu: ModuleType, native: bool) -> AbstractContextManager[object]:
    """Within it an op's module `cpu` runs in C, or does not."""
    return patch.object(cpu, "has_started", lambda: native)
