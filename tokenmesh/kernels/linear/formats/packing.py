"""Integers of 2 to 8 bits in words of 32, and numbers of 4 bits in bytes."""

from collections.abc import Sequence

import torch

WORD_BITS = 32


def unpack_words(words: torch.Tensor, bits: int, count: int | None = None) -> torch.Tensor:
    """words int32 [..., W] -> uint8 [..., count]: a stream of bits, the lowest first.

    count: None for all of them. Where `bits` does not divide 32, numbers cross words (3 bits: 32
    in 3 words).
    """
    mask = (1 << bits) - 1
    if WORD_BITS % bits == 0:
        shifts = range(0, WORD_BITS, bits)
        numbers = torch.stack([((words >> shift) & mask).to(torch.uint8) for shift in shifts], -1)
        return numbers.flatten(-2)[..., :count]
    total = words.shape[-1] * WORD_BITS // bits
    first = torch.arange(total if count is None else count) * bits
    low, shift = first // WORD_BITS, first % WORD_BITS
    high = (low + 1).clamp_max(words.shape[-1] - 1)
    stream = words.long() & 0xFFFFFFFF
    # past the last word nothing is left to cross into, so what lies there does not matter
    pairs = stream[..., low] | (stream[..., high] << WORD_BITS)
    return ((pairs >> shift) & mask).to(torch.uint8)


def unpack_halves(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] -> uint8 [..., 2B]: two numbers of 4 bits a byte, the first in the lower."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def spread(scales: torch.Tensor, tile: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """scales [ceil(O / rows), ceil(I / columns)], tile (rows, columns) -> [O, I]."""
    for dim, size in enumerate(tile):
        if scales.shape[dim] != 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales.expand(*shape)
