"""TokenMesh: LLM serving as a mesh of small services."""

from typing import Final

__version__: Final = "0.1.0"
