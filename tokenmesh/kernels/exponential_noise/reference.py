"""The specification of exponential_noise, in Python's whole numbers."""

import math
import struct

MASK_32 = (1 << 32) - 1
MASK_64 = (1 << 64) - 1


def exponential_noise_reference(seed: int, position: int, token_id: int) -> float:
    """The number for one key."""
    bits = noise_bits_reference(seed, position, token_id)
    uniform = min(_float32(_float32(bits) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log1p(-uniform)


def noise_bits_reference(seed: int, position: int, token_id: int) -> int:
    """The 31 bits that the number is made of."""
    row = splitmix64(splitmix64(seed & MASK_64) ^ (position & MASK_64))
    low, high = row & MASK_32, row >> 32
    bits = ((lowbias32(token_id) ^ low) * 0x7FEB352D) & MASK_32
    bits = (((bits ^ (bits >> 16)) + high) * 0x846CA68B) & MASK_32
    return (bits ^ (bits >> 15)) & 0x7FFFFFFF


def _float32(x: float) -> float:
    """Rounded to 24 bits, as every implementation does before the logarithm."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def splitmix64(x: int) -> int:
    """One step of Steele, Lea and Flood's generator as a hash."""
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK_64
    return x ^ (x >> 31)


def lowbias32(x: int) -> int:
    """Wellons' finalizer: every input bit flips every output bit about half of the time."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)
