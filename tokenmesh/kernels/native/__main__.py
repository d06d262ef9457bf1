"""Compile the kernels into a folder and say where they are."""

import sys
from pathlib import Path

from tokenmesh.kernels.native.build import compiled

sys.stdout.write(f"{compiled(Path(sys.argv[1]))}\n")
