"""Compile the kernels and say where they are."""

import sys

from tokenmesh.kernels.native.build import compiled

sys.stdout.write(f"{compiled()}\n")
