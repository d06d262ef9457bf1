"""TokenMesh: LLM serving as a mesh of small services."""

import os
from typing import Final

__version__: Final = "0.1.0"

# torch's OpenMP threads sleep when they have no work. By default they spin for milliseconds on the
# cores of the C kernels and of other services: 0.6 times the tokens a second at 8 streams on two
# cores. libgomp reads it when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
