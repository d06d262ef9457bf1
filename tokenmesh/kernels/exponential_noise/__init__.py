"""exponential_noise: a reproducible Exp(1) number for each (seed, output position, token id).

argmax(p / noise) draws a token with probability p (the Gumbel-max trick without two logarithms).
The number depends on nothing but its three keys: not on the batch, the chunking, the attempt or
the device. The generator is Philox 4x32-10 (Random123), whose outputs for different counters and
keys pass every test of independence that is published. The seed is the key; the counter's words
are (token id // 4, position's lower half, position's upper half, 0), and word `token id % 4` of
the result belongs to the token. Its upper 31 bits make u = (bits + 0.5) / 2^31 in float32, at most
1 - 2^-24, and the number is -log(1 - u).

seeds      [rows] int64
positions  [rows] int64     output position, 0 for the first generated token
token_ids  [rows, n], int32 or int64, not negative
returns    [rows, vocab_size] or [rows, n] float32, all above 0 and finite

The integers behind the numbers are equal on every device. Their logarithms are as exact as each
device's library makes them, to 1e-6: two devices draw different tokens only where the two best
scores are that close, about once in a million draws.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.exponential_noise import cpu
from tokenmesh.kernels.exponential_noise.reference import TOLERANCE, exponential_noise_reference

__all__ = ["TOLERANCE", "exponential_noise", "exponential_noise_of", "exponential_noise_reference"]


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """The numbers of tokens 0 to vocab_size - 1: a new tensor [rows, vocab_size]."""
    if uses_triton(seeds):
        from tokenmesh.kernels.exponential_noise import triton

        return triton.exponential_noise(seeds, positions, vocab_size)
    return cpu.exponential_noise(seeds, positions, vocab_size)


def exponential_noise_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """The numbers of some tokens of each row: a new tensor [rows, n].

    One token costs what four neighbors cost in `exponential_noise`.
    """
    if uses_triton(seeds):
        from tokenmesh.kernels.exponential_noise import triton

        return triton.exponential_noise_of(seeds, positions, token_ids)
    return cpu.exponential_noise_of(seeds, positions, token_ids)
