"""Alignment that a launch needs for wide loads and pipelining.

Triton specializes a kernel on pointers and strides that are multiples of 16. Without it the kernel
still gives right results, several times slower, and nothing else would say so.
"""

from typing import Final

import torch

MULTIPLE: Final = 16


def assert_aligned_rows(*tensors: torch.Tensor) -> None:
    """The last dimension is contiguous, all other strides are multiples of 16 elements.

    The stride of a dimension with one element does not count.
    """
    for tensor in tensors:
        assert tensor.stride(-1) == 1, "the last dimension is not contiguous"
        assert tensor.data_ptr() % MULTIPLE == 0, "the first element is not aligned"
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            assert size == 1 or stride % MULTIPLE == 0, (
                f"pad the rows: strides {tensor.stride()} are not multiples of {MULTIPLE}"
            )


def padded(length: int) -> int:
    """The least multiple of 16 that is not below length: how wide to allocate a row."""
    return -(-length // MULTIPLE) * MULTIPLE
