"""How a service ends, as its parent sees it."""

from typing import Final

CLEAN: Final = 0
CRASHED: Final = 1
BAD_CONFIG: Final = 2
NO_BUS: Final = 3
DRAINED: Final = 4
"""It was told to leave for good: whoever keeps processes alive should not start it again."""
