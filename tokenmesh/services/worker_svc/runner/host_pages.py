"""Giving the pages of host memory back to the system without giving up the addresses."""

import ctypes
import logging
import mmap

import torch

logger = logging.getLogger(__name__)


def give_back(tensor: torch.Tensor) -> None:
    """Free what a contiguous CPU tensor occupies; it reads as zeros, and takes pages when written.

    Whoever holds a pointer to it may keep it. Pages that it shares with other data stay.
    """
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    first = -(-start // page) * page
    length = (start + tensor.nbytes) // page * page - first
    if length <= 0:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    where = (ctypes.c_void_p(first), ctypes.c_size_t(length))
    # the first is for memory that is mapped as shared, the second for all other
    if madvise(*where, mmap.MADV_REMOVE) and madvise(*where, mmap.MADV_DONTNEED):
        logger.warning("the system keeps %d bytes (errno %d)", length, ctypes.get_errno())
