"""The process's one pool of threads for the C kernels."""

import ctypes
import logging

from tokenmesh.kernels.native.build import library

logger = logging.getLogger(__name__)


def start(num_threads: int, spin_us: float) -> bool:
    """Compile if need be and have `num_threads` threads, the caller's included. False: no kernels.

    Between two pieces of work the threads look for more for `spin_us` microseconds, then sleep.
    The pool is the process's; starting it again can only add threads.
    """
    kernels = library()
    if kernels is None:
        return False
    there: int = kernels.tm_pool_start(ctypes.c_int(num_threads), ctypes.c_long(int(spin_us * 1e3)))
    if there < num_threads:
        logger.warning("the system gave %d of %d threads", there, num_threads)
    return True
