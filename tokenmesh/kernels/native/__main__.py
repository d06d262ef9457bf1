"""Compile the kernels into a folder, for each processor that can run them, and say where they are.

What compiles them is not what runs them: an image is built on one machine and started on others.
"""

import sys
from pathlib import Path

from tokenmesh.kernels.native.build import LEVELS, compiled

for level in LEVELS:
    sys.stdout.write(f"{compiled(Path(sys.argv[1]), level)}\n")
