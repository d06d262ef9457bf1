"""A child does not outlive the process that started it, kill -9 included.

Only Linux can promise that; elsewhere services look for their parent (`service.exit_with_parent`).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def dies_with_parent() -> Callable[[], None]:
    """A `preexec_fn` for a child of this process, to be started by a thread that stays."""
    parent = os.getpid()
    return lambda: die_with(parent)


def die_with(parent: int) -> None:
    """In a child: the kernel kills this process as soon as its parent's thread has ended."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)
