"""The noise of draws in C: one number for each seed, position and token."""

import ctypes

import torch

from tokenmesh.kernels.native.start import library


def native_noise(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: int | torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """seeds, positions [R] int64; token ids [R, n], or n for the ids below n -> [R, n].

    float32, or int32 for the 31 bits behind each number.
    """
    seeds, positions = seeds.contiguous(), positions.contiguous()
    ids = None if isinstance(tokens, int) else tokens.long().contiguous()
    size = tokens if isinstance(tokens, int) else tokens.shape[-1]
    assert ids is None or ids.shape[0] == seeds.shape[0]
    out = torch.empty(seeds.shape[0], size, dtype=dtype)
    library().tm_noise(
        ctypes.c_void_p(seeds.data_ptr()),
        ctypes.c_void_p(positions.data_ptr()),
        ctypes.c_void_p(None if ids is None else ids.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_long(seeds.shape[0]),
        ctypes.c_long(size),
        ctypes.c_int(dtype == torch.int32),
    )
    return out
