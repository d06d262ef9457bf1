"""Copies between blocks of a KV pool and their images in C: a thread copies whole blocks."""

import ctypes
from typing import ClassVar

import torch

from tokenmesh.kernels.native.start import library


class _Copies(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("pool", "images", "blocks", "slots")),
        *((name, ctypes.c_long) for name in ("pieces", "piece_bytes", "plane_bytes")),
        ("image_bytes", ctypes.c_long),
        ("is_out", ctypes.c_int),
    ]


def native_copy_blocks(
    pool: torch.Tensor,
    blocks: torch.Tensor,
    images: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    *,
    out: bool,
) -> None:
    """See kernels.kv_blocks; out: from the pool to images."""
    pieces, num_blocks, piece_bytes = pool.shape
    assert pool.is_contiguous()
    assert images.is_contiguous()
    assert first + pieces * piece_bytes <= images.shape[1]
    blocks, slots = blocks.contiguous(), slots.contiguous()
    assert blocks.shape == slots.shape
    job = _Copies(
        pool.data_ptr(),
        images.data_ptr() + first,
        *(blocks.data_ptr(), slots.data_ptr()),
        *(pieces, piece_bytes, num_blocks * piece_bytes),
        images.shape[1],
        out,
    )
    library().tm_copy_blocks(ctypes.byref(job), ctypes.c_long(len(blocks)))
