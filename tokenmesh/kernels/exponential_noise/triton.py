"""exponential_noise on a GPU: functions that other kernels inline, and the op by itself.

The bits are equal to the CPU's, and so is the uniform number made of them. The logarithm is not:
each library rounds its own, so the last two bits of the result may differ.
"""

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.exponential_noise.reference import (
    KEY_STEPS,
    MULTIPLIERS,
    ROUNDS,
)
from tokenmesh.kernels.fusion import FUSED

BLOCK = 1024
_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_2 = tl.constexpr(MULTIPLIERS[1])
_KEY_STEP_0 = tl.constexpr(KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(KEY_STEPS[1])


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """seeds, positions [R] int64 -> [R, vocab_size] float32."""
    return _launch(seeds, positions, None, vocab_size, torch.float32)


def exponential_noise_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """seeds, positions [R] int64, token_ids [R, n] -> [R, n] float32."""
    return _launch(seeds, positions, token_ids, token_ids.shape[1], torch.float32)


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The 31 random bits behind each number: [R, vocab_size] int32."""
    return _launch(seeds, positions, None, vocab_size, torch.int32)


def noise_bits_of(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """The 31 random bits behind each token's number: [R, n] int32."""
    return _launch(seeds, positions, token_ids, token_ids.shape[1], torch.int32)


def _launch(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor | None,
    size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows = seeds.shape[0]
    out = torch.empty(rows, size, dtype=dtype, device=seeds.device)
    if out.numel():
        ids = None if token_ids is None else token_ids.int().contiguous()
        grid = (rows, triton.cdiv(size, BLOCK))
        exponential_noise_kernel[grid](seeds, positions, ids, out, size, BLOCK=BLOCK, **FUSED)
    return out


@triton.jit
def _multiplied(word, factor: tl.constexpr):
    """uint32 -> upper and lower half of the product."""
    product = word.to(tl.uint64) * factor
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(seed, position, blocks):
    """seed, position int64, blocks int32 -> four words each, uint32."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.int64).to(tl.uint64, bitcast=True)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0 = blocks.to(tl.uint32, bitcast=True)
    c1, c2 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c3 = tl.zeros((), tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high0, low0 = _multiplied(c0, _MULTIPLIER_0)
        high2, low2 = _multiplied(c2, _MULTIPLIER_2)
        c0, c2 = high2 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low2, low0
        k0 += _KEY_STEP_0
        k1 += _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def _bits_from(seed, position, start, BLOCK: tl.constexpr):
    """31 bits, int32 [BLOCK], for the tokens from `start`, a multiple of 4."""
    w0, w1, w2, w3 = _philox(seed, position, start // 4 + tl.arange(0, BLOCK // 4))
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return (words >> 1).to(tl.int32, bitcast=True)


@triton.jit
def _bits_of(seed, position, token_ids):
    """31 bits for each token id, int32."""
    w0, w1, w2, w3 = _philox(seed, position, token_ids // 4)
    is_odd, is_upper = (token_ids & 1) != 0, (token_ids & 2) != 0
    words = tl.where(is_upper, tl.where(is_odd, w3, w2), tl.where(is_odd, w1, w0))
    return (words >> 1).to(tl.int32, bitcast=True)


@triton.jit
def exponential_of_bits(bits):
    """31 bits, int32 -> -log(1 - u), float32, for u = (bits + 0.5) / 2^31.

    1 - u = m * 2^k with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)), five terms.
    Small u would lose their bits in 1 - u; there k is 0 and m - 1 is -u itself.
    """
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    rest_bits = (1.0 - uniform).to(tl.int32, bitcast=True)
    k = (rest_bits - 0x3F3504F3) >> 23
    m = (rest_bits - (k << 23)).to(tl.float32, bitcast=True)
    f = tl.where(k == 0, -uniform, m - 1.0)
    s = f / (f + 2.0)
    z = s * s
    series = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
    return -(2.0 * s + 2.0 * s * series) - k.to(tl.float32) * 0.6931471805599453


@triton.jit
def exponential_from(seed, position, start, BLOCK: tl.constexpr):
    """The numbers of BLOCK tokens from `start`, a multiple of 4 -> float32."""
    return exponential_of_bits(_bits_from(seed, position, start, BLOCK))


@triton.jit
def exponential_of(seed, position, token_ids):
    """The number of each token id, int32 -> float32."""
    return exponential_of_bits(_bits_of(seed, position, token_ids))


@triton.jit
def exponential_noise_kernel(
    seeds_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    ids_ptr,  # [R, size] int32, or None for the tokens below size
    out_ptr,  # [R, size] float32, or int32 for the bits
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    offs = start + tl.arange(0, BLOCK)
    mask = offs < size
    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    if ids_ptr is None:
        bits = _bits_from(seed, position, start, BLOCK)
    else:
        ids = tl.load(ids_ptr + row * size + offs, mask=mask, other=0)
        bits = _bits_of(seed, position, ids)
    if out_ptr.dtype.element_ty == tl.int32:
        tl.store(out_ptr + row * size + offs, bits, mask=mask)
    else:
        tl.store(out_ptr + row * size + offs, exponential_of_bits(bits), mask=mask)
