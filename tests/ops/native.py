"""What tests of the C kernels share."""

from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest

from tokenmesh.kernels.native import start

FOLDER = Path("~/.cache/tokenmesh/kernels")

needs_native = pytest.mark.skipif(
    not start(3, 20, FOLDER), reason="no AVX-512 BF16 or no C compiler: there are no C kernels here"
)
"""With more threads than most test machines have cores: some are always put aside."""

WAYS = [pytest.param(False, id="torch"), pytest.param(True, id="native", marks=needs_native)]


def way(cpu: ModuleType, native: bool) -> AbstractContextManager[object]:
    """Within it an op's module `cpu` runs in C, or does not."""
    return patch.object(cpu, "has_started", lambda: native)
