"""How a service ends, as its parent sees it."""

from typing import Final

CLEAN: Final = 0
CRASHED: Final = 1
BAD_CONFIG: Final = 2
NO_BUS: Final = 3
