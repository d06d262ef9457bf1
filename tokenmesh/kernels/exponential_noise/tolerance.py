"""How far an implementation may be from the reference: relative, the hash itself is equal."""

from typing import Final

TOLERANCE: Final = 1e-6
