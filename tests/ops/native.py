"""What tests of the C kernels share."""

from pathlib import Path

import pytest

from tokenmesh.kernels.native import start

FOLDER = Path("~/.cache/tokenmesh/kernels")

needs_native = pytest.mark.skipif(
    not start(3, 20, FOLDER), reason="no AVX-512 BF16 or no C compiler: there are no C kernels here"
)
"""With more threads than most test machines have cores: some are always put aside."""
