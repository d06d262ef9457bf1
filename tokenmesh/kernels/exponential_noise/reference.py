"""The specification of exponential_noise, in Python's integers."""

import math
import struct
from typing import Final

TOLERANCE: Final = 1e-6
"""Largest relative difference of an implementation from the reference;
the hash itself is equal."""

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
"""Multipliers of Philox 4x32, for the counter's words 0 and 2."""
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
"""Added to the two words of the key in each round."""
ROUNDS: Final = 10
MASK_32: Final = (1 << 32) - 1
MASK_64: Final = (1 << 64) - 1

_Words = tuple[int, int, int, int]


def exponential_noise_reference(seed: int, position: int, token_id: int) -> float:
    """The number for one seed, position and token."""
    bits = noise_bits_reference(seed, position, token_id)
    uniform = min(_float32(_float32(bits) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log1p(-uniform)


def noise_bits_reference(seed: int, position: int, token_id: int) -> int:
    """The 31 bits that the number is made of."""
    key, position = seed & MASK_64, position & MASK_64
    counter = (token_id // 4, position & MASK_32, position >> 32, 0)
    return philox_4x32(counter, (key & MASK_32, key >> 32))[token_id % 4] >> 1


def philox_4x32(counter: _Words, key: tuple[int, int]) -> _Words:
    """Ten rounds of Philox 4x32 (Salmon, Moraes, Dror and Shaw, 2011): 128 bits of a counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product2 >> 32) ^ c1 ^ k0, product2 & MASK_32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & MASK_32
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK_32, (k1 + KEY_STEPS[1]) & MASK_32
    return c0, c1, c2, c3


def _float32(x: float) -> float:
    """Rounded to 24 bits, as every implementation does before the logarithm."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])
