"""exponential_noise in torch's signed integers, whose multiplication wraps as it should.

A shift right of a negative number fills with ones, so every shift is followed by a mask.
"""

from typing import Final

import torch

_SPLITMIX_STEP: Final = 0x9E3779B97F4A7C15
_SPLITMIX_ROUNDS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LOWBIAS_ROUNDS: Final = ((16, 0x7FEB352D), (15, 0x846CA68B))
_LARGEST_UNIFORM: Final = 1 - 2**-24


def token_keys(token_ids: torch.Tensor) -> torch.Tensor:
    """The part of the hash that depends on the tokens only: int32 -> int32, a new tensor."""
    keys = token_ids.clone()
    for shift, factor in _LOWBIAS_ROUNDS:
        keys.bitwise_xor_(_shifted(keys, shift, 32)).mul_(_signed(factor, 32))
    return keys.bitwise_xor_(_shifted(keys, 16, 32))


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """seeds, positions [R] int64, keys [n] or [R, n] int32 from `token_keys` -> [R, n] float32."""
    rows = _splitmix64(_splitmix64(seeds) ^ positions).unsqueeze(1)
    low, high = rows.to(torch.int32), (rows >> 32).to(torch.int32)
    # in place, so that one row of a large vocabulary stays in the cache
    bits = (keys ^ low).mul_(_signed(_LOWBIAS_ROUNDS[0][1], 32))
    bits.bitwise_xor_(_shifted(bits, 16, 32)).add_(high).mul_(_signed(_LOWBIAS_ROUNDS[1][1], 32))
    bits.bitwise_xor_(_shifted(bits, 15, 32)).bitwise_and_(0x7FFFFFFF)
    minus_uniform = bits.float().add_(0.5).mul_(-(2**-31)).clamp_(min=-_LARGEST_UNIFORM)
    return minus_uniform.log1p_().neg_()


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    x = x + _signed(_SPLITMIX_STEP, 64)
    for shift, factor in _SPLITMIX_ROUNDS:
        x = (x ^ _shifted(x, shift, 64)) * _signed(factor, 64)
    return x ^ _shifted(x, 31, 64)


def _shifted(x: torch.Tensor, shift: int, width: int) -> torch.Tensor:
    """Logical shift right."""
    return (x >> shift).bitwise_and_((1 << (width - shift)) - 1)


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value
