"""exponential_noise: a reproducible Exp(1) number for each (seed, output position, token id).

argmax(p / noise) draws a token with probability p (the Gumbel-max trick without two logarithms).
The number depends on nothing but its three keys: not on the batch, the chunking, the attempt or
the device. Counter-based: splitmix64 of seed and position gives two 32-bit keys, which two rounds
of multiply and shift mix with a hash of the token id.

seeds      [rows] int64
positions  [rows] int64     output position, 0 for the first generated token
keys       [n] or [rows, n] int32, `token_keys` of the token ids: hash a vocabulary once
returns    [rows, n] float32, all above 0 and finite
"""

from typing import Final

from tokenmesh.kernels.exponential_noise.cpu import exponential_noise, token_keys
from tokenmesh.kernels.exponential_noise.reference import exponential_noise_reference

TOLERANCE: Final = 1e-6
"""Relative; the integers behind the numbers are equal."""

__all__ = ["TOLERANCE", "exponential_noise", "exponential_noise_reference", "token_keys"]
