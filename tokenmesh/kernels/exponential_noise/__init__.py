"""exponential_noise: a reproducible Exp(1) number for each (seed, output position, token id).

argmax(p / noise) draws a token with probability p (the Gumbel-max trick without two logarithms).
The number depends on nothing but its three keys: not on the batch, the chunking, the attempt or
the device. Counter-based: splitmix64 of seed and position gives two 32-bit keys, which two rounds
of multiply and shift mix with a hash of the token id.

seeds      [rows] int64
positions  [rows] int64     output position, 0 for the first generated token
keys       [n] or [rows, n] int32, `token_keys` of the token ids: hash a vocabulary once
returns    [rows, n] float32, all above 0 and finite

The integers behind the numbers are equal on every device. Their logarithms are as exact as each
device's library makes them, to 1e-6: two devices draw different tokens only where the two best
scores are that close, about once in a million draws.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.exponential_noise.cpu import exponential_noise as exponential_noise_on_cpu
from tokenmesh.kernels.exponential_noise.cpu import token_keys
from tokenmesh.kernels.exponential_noise.reference import exponential_noise_reference
from tokenmesh.kernels.exponential_noise.tolerance import TOLERANCE

__all__ = ["TOLERANCE", "exponential_noise", "exponential_noise_reference", "token_keys"]


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """A new tensor [rows, n]."""
    if uses_triton(keys):
        from tokenmesh.kernels.exponential_noise import triton

        return triton.exponential_noise(seeds, positions, keys)
    return exponential_noise_on_cpu(seeds, positions, keys)
