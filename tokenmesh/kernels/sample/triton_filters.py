"""start, survey, pick, gather: the few tokens among which a row with filters will choose.

All tokens above one weight, the pivot, are candidates; it must lie below all that is kept. `start`
has one where min_p is set (just below it) or top_k is at most the number of blocks (just below the
k-th best of the blocks' best). Elsewhere `survey` counts and sums the weights above eight pivots
and `pick` takes the highest that leaves top_k tokens, or top_p of the mass, above it.

Weights are compared by their bits as float32, which sort like the floats.
"""

from typing import Final

import triton
import triton.language as tl

from tokenmesh.kernels.sample.triton_race import has_filter, load_scaled

PIVOTS: Final = 8
"""2^-1, 2^-3, 2^-6 .. 2^-28 and, at last, one below all weights."""
_PIVOTS = tl.constexpr(PIVOTS)
_BITS_OF_ONE = tl.constexpr(0x3F800000)
_ALL = tl.constexpr(-1)
"""The pivot below all weights."""
_NO_FILTER = tl.constexpr(-2)
"""Value in place of a pivot: the row needs no filter."""
UNIT: Final = tl.constexpr(float(2**44))
"""Masses are counted in 1 / UNIT: 2^19 weights of 1 just do not fit into an int64."""


@triton.jit
def mass_of(weight):
    """Weights, float32 -> int64."""
    return (weight * UNIT).to(tl.int64)


@triton.jit
def bits_of(weight):
    """The bits of a float32, as int32."""
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def share_of(top_p, total):
    """The least mass that is not less than top_p of the total; more than there is for top_p 1."""
    share = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.where(top_p < 1, share, total + 1)


@triton.jit
def lowest(low, bound, bits, amount):
    """The smallest t above `low` so that less than `bound` of the amount lies above it.

    bits, int32, are weights or -1; amount, int64, is what each of them adds. Each step moves both
    ends to the next weight, so the steps are about the logarithm of the number of weights.
    """
    high = low * 0 + _BITS_OF_ONE
    while high - low > 1:
        middle = (low + high) // 2
        is_above = bits > middle
        is_under = tl.sum(tl.where(is_above, amount, 0), axis=0) < bound
        # the largest weight that is not above, or minus the smallest that is
        sign = tl.where(is_under, 1, -1)
        is_inside = is_above == (sign < 0)
        edge = tl.max(tl.where(is_inside, bits * sign, -_BITS_OF_ONE), axis=0) * sign
        high = tl.where(is_under, tl.maximum(edge, low + 1), high)
        low = tl.where(is_under, low, tl.minimum(edge, high) - 1)
    return high


@triton.jit
def _fixed_pivot(j):
    """Bits of pivot j."""
    return tl.where(j == _PIVOTS - 1, _ALL, (127 - (j + 1) * (j + 2) // 2) << 23)


@triton.jit
def start_kernel(
    idx_mapping_ptr,  # [N]
    temperature_ptr,  # [R], as the next three
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    best_ptr,  # [N, blocks]
    row_best_ptr,  # [N] out
    pivot_ptr,  # [N] out: bits, _ALL when the row needs a survey, _NO_FILTER
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + n).to(tl.int64)
    pivot = tl.full((), _NO_FILTER, tl.int32)
    if row >= 0:
        blocks = tl.arange(0, BLOCKS)
        mask = blocks < num_blocks
        bests = tl.load(best_ptr + n * num_blocks + blocks, mask=mask, other=float("-inf"))
        best = tl.max(bests, axis=0)
        tl.store(row_best_ptr + n, best)
        is_on = has_filter(row, vocab_size, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr)
        if is_on & (tl.abs(best) != float("inf")):
            pivot = bits_of(tl.load(min_p_ptr + row)) - 1
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k <= num_blocks):
                bits = tl.where(mask, bits_of(tl.exp(bests - best)), -1)
                kth = lowest(tl.full((), -1, tl.int32), top_k, bits, mask.to(tl.int64))
                pivot = tl.maximum(pivot, kth - 1)
    tl.store(pivot_ptr + n, pivot)


@triton.jit
def survey_kernel(
    logits_ptr,  # [N, V]
    stride_n,
    idx_mapping_ptr,  # [N]
    temperature_ptr,  # [R]
    row_best_ptr,  # [N]
    pivot_ptr,  # [N]
    count_ptr,  # [N, PIVOTS, blocks] out: tokens above each pivot; a row's own pivot stands first
    mass_ptr,  # [N, PIVOTS, blocks] out: their mass; not for a row's own pivot
    vocab_size,
    BLOCK: tl.constexpr,
):
    n, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    pivot = tl.load(pivot_ptr + n)
    if pivot == _NO_FILTER:
        return
    temperature = tl.load(temperature_ptr + tl.load(idx_mapping_ptr + n))
    offs = block * BLOCK + tl.arange(0, BLOCK)
    x = load_scaled(logits_ptr + n * stride_n, offs, vocab_size, temperature)
    weight = tl.exp(x - tl.load(row_best_ptr + n))
    bits = tl.where(offs < vocab_size, bits_of(weight), -1)
    out = n * _PIVOTS * num_blocks + block
    if pivot != _ALL:
        tl.store(count_ptr + out, tl.sum((bits > pivot).to(tl.int32), axis=0))
        return
    mass = mass_of(weight)
    for j in tl.static_range(_PIVOTS):
        is_above = bits > (-1 if j == _PIVOTS - 1 else (127 - (j + 1) * (j + 2) // 2) << 23)
        tl.store(count_ptr + out + j * num_blocks, tl.sum(is_above.to(tl.int32), axis=0))
        tl.store(mass_ptr + out + j * num_blocks, tl.sum(tl.where(is_above, mass, 0), axis=0))


@triton.jit
def pick_kernel(
    idx_mapping_ptr,  # [N]
    top_k_ptr,  # [R]
    top_p_ptr,  # [R]
    count_ptr,  # [N, PIVOTS, blocks]
    mass_ptr,  # [N, PIVOTS, blocks]
    pivot_ptr,  # [N] changed: the pivot that was taken
    num_above_ptr,  # [N] out: tokens above it
    total_ptr,  # [N] out: mass of the whole row, where it was surveyed
    first_ptr,  # [N, blocks] out: place of each block's first candidate
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    pivot = tl.load(pivot_ptr + n)
    if pivot == _NO_FILTER:
        return
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    base = n * _PIVOTS * num_blocks
    chosen = tl.zeros((), tl.int32)
    if pivot == _ALL:
        row = tl.load(idx_mapping_ptr + n).to(tl.int64)
        top_k = tl.load(top_k_ptr + row)
        j = tl.arange(0, _PIVOTS)
        offs = base + j[:, None] * num_blocks + blocks[None, :]
        counts = tl.sum(tl.load(count_ptr + offs, mask=mask[None, :], other=0), axis=1)
        masses = tl.sum(tl.load(mass_ptr + offs, mask=mask[None, :], other=0), axis=1)
        total = tl.sum(tl.where(j == _PIVOTS - 1, masses, 0), axis=0)
        needed = share_of(tl.load(top_p_ptr + row), total)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        is_safe = tl.where(has_top_k, counts >= top_k, masses >= needed)
        chosen = tl.min(tl.where(is_safe, j, _PIVOTS - 1), axis=0)
        tl.store(pivot_ptr + n, _fixed_pivot(chosen))
        tl.store(total_ptr + n, total)
    counts = tl.load(count_ptr + base + chosen * num_blocks + blocks, mask=mask, other=0)
    tl.store(num_above_ptr + n, tl.sum(counts, axis=0))
    tl.store(first_ptr + n * num_blocks + blocks, tl.cumsum(counts, axis=0) - counts, mask=mask)


@triton.jit
def gather_kernel(
    logits_ptr,  # [N, V]
    stride_n,
    idx_mapping_ptr,  # [N]
    temperature_ptr,  # [R]
    best_ptr,  # [N, blocks]
    row_best_ptr,  # [N]
    pivot_ptr,  # [N]
    num_above_ptr,  # [N]
    first_ptr,  # [N, blocks]
    weight_ptr,  # [N, CANDIDATES] out
    id_ptr,  # [N, CANDIDATES] out: ascending
    vocab_size,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pivot = tl.load(pivot_ptr + n)
    if pivot == _NO_FILTER:
        return
    partial = n * tl.num_programs(1) + block
    best = tl.load(row_best_ptr + n)
    is_empty = bits_of(tl.exp(tl.load(best_ptr + partial) - best)) <= pivot
    if is_empty | (tl.load(num_above_ptr + n) > CANDIDATES):
        return
    temperature = tl.load(temperature_ptr + tl.load(idx_mapping_ptr + n))
    offs = block * BLOCK + tl.arange(0, BLOCK)
    x = load_scaled(logits_ptr + n * stride_n, offs, vocab_size, temperature)
    weight = tl.exp(x - best)
    is_above = (bits_of(weight) > pivot) & (offs < vocab_size)
    place = tl.load(first_ptr + partial) + tl.cumsum(is_above.to(tl.int32), axis=0) - 1
    out = n * CANDIDATES + place
    tl.store(weight_ptr + out, weight, mask=is_above)
    tl.store(id_ptr + out, offs, mask=is_above)
