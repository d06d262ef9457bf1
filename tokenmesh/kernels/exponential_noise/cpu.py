"""exponential_noise on a CPU: in C where the C kernels have been started, else with NumPy.

NumPy has unsigned 64-bit products, which Philox needs. Four tokens share one counter, so its
rounds run over a quarter of the vocabulary.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tokenmesh.kernels.exponential_noise.reference import KEY_STEPS, MULTIPLIERS, ROUNDS
from tokenmesh.kernels.native import has_started, native_noise

_LARGEST_UNIFORM: Final = 1 - 2**-24
_MASK: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ONE: Final = np.uint64(1)
_PIECE: Final = 1 << 15
"""Counters of several rows that are worked on at a time: they stay in the cache."""

_Words = npt.NDArray[np.uint64]
"""32-bit words in arrays that broadcast against each other."""


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """seeds, positions [R] int64 -> [R, vocab_size] float32."""
    if has_started():
        return native_noise(seeds, positions, vocab_size)
    return _exponential_of(noise_bits(seeds, positions, vocab_size))


def exponential_noise_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """seeds, positions [R] int64, token_ids [R, n] -> [R, n] float32."""
    if has_started():
        return native_noise(seeds, positions, token_ids)
    return _exponential_of(noise_bits_of(seeds, positions, token_ids))


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The 31 random bits of all tokens, by NumPy: [R, vocab_size] int32."""
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)[np.newaxis]
    bits = np.empty((len(seeds), blocks.size, 2), dtype=np.uint64)
    at_once = max(1, _PIECE // max(1, blocks.size))
    for first in range(0, len(seeds), at_once):
        rows = slice(first, first + at_once)
        words = _words_of(seeds[rows], positions[rows], blocks)
        for pair in range(2):
            low, high = words[2 * pair] >> _ONE, words[2 * pair + 1] >> _ONE
            # in the order of memory of a little-endian processor
            np.bitwise_or(low, high << _HALF, out=bits[rows, :, pair])
    return torch.from_numpy(bits.view(np.int32)).view(len(seeds), -1)[:, :vocab_size]


def noise_bits_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """The 31 random bits of tokens [R, n], by NumPy: int32."""
    ids = token_ids.numpy().astype(np.uint64)
    words = _words_of(seeds, positions, ids // np.uint64(4))
    lanes = (ids % np.uint64(4)).astype(np.intp)
    return torch.from_numpy((np.choose(lanes, words) >> _ONE).astype(np.int32))


def _words_of(seeds: torch.Tensor, positions: torch.Tensor, blocks: _Words) -> list[_Words]:
    """Four arrays [R, n] of random words for blocks [1, n] or [R, n]."""
    keys, places = (
        x.contiguous().numpy().view(np.uint64)[:, np.newaxis] for x in (seeds, positions)
    )
    counter = (blocks, places & _MASK, places >> _HALF, np.zeros_like(places))
    return philox_4x32(counter, (keys & _MASK, keys >> _HALF))


def philox_4x32(
    counter: tuple[_Words, _Words, _Words, _Words], key: tuple[_Words, _Words]
) -> list[_Words]:
    """See the reference; an array stays as small as what it depends on for the first rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    multipliers, steps = (tuple(map(np.uint64, pair)) for pair in (MULTIPLIERS, KEY_STEPS))
    for _ in range(ROUNDS):
        product0, product2 = c0 * multipliers[0], c2 * multipliers[1]
        c0, c2 = _mixed(product2, c1, k0), _mixed(product0, c3, k1)
        # their upper halves are masked where they are used
        c1, c3 = product2, product0
        k0, k1 = (k0 + steps[0]) & _MASK, (k1 + steps[1]) & _MASK
    return [c0, c1 & _MASK, c2, c3 & _MASK]


def _mixed(product: _Words, word: _Words, key: _Words) -> _Words:
    mixed = (product >> _HALF) ^ word
    mixed ^= key
    mixed &= _MASK
    return mixed


def _exponential_of(bits: torch.Tensor) -> torch.Tensor:
    """-log(1 - u) for u = (bits + 0.5) / 2^31; in place, so that a row stays in the cache."""
    minus_uniform = bits.float().add_(0.5).mul_(-(2**-31)).clamp_(min=-_LARGEST_UNIFORM)
    return minus_uniform.log1p_().neg_()
