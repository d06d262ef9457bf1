"""The process's one copy of the C kernels and its one pool of threads."""

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path

from tokenmesh.kernels.native.build import NativeUnavailable, load

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Process:
    kernels: ctypes.CDLL | None = None


_process = _Process()


def start(num_threads: int, spin_us: float, folder: Path) -> bool:
    """Compile into `folder` if need be and have `num_threads` threads, the caller's included.

    Between two pieces of work the threads look for more for `spin_us` microseconds, then sleep.
    Starting again can only add threads. Returns False, and logs why, where they are
    unavailable.
    """
    try:
        kernels = _process.kernels or load(folder)
    except NativeUnavailable as error:
        logger.warning("no C kernels, torch's slower ones are used: %s", error)
        return False
    _process.kernels = kernels
    there: int = kernels.tm_pool_start(ctypes.c_int(num_threads), ctypes.c_long(int(spin_us * 1e3)))
    if there < num_threads:
        logger.warning("the system gave %d of %d threads", there, num_threads)
    return True


def has_started() -> bool:
    """Return whether this process has loaded the kernels."""
    return _process.kernels is not None


def library() -> ctypes.CDLL:
    """The kernels, once they have been started."""
    assert _process.kernels is not None, "the C kernels have not been started"
    return _process.kernels
