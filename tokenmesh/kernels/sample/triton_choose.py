"""choose: one program a row joins what the blocks found, or finds the floor of a filtered row.

The floor is the smallest weight that is kept. top_k: the smallest t so that fewer than top_k
weights lie above it; top_p: so that less than top_p of the mass does. Both by bisection over the
bits of t, which sort like floats, among the candidates or, when there are too many, the whole row.
"""

import triton
import triton.language as tl

from tokenmesh.kernels.exponential_noise.triton import exponential_from, exponential_of
from tokenmesh.kernels.sample.rows import HID_DEFECT, HID_NUMBER, NOT_FINITE, NOTHING_ALLOWED
from tokenmesh.kernels.sample.triton_filters import bits_of, lowest, mass_of, share_of
from tokenmesh.kernels.sample.triton_race import load_scaled

_BITS_OF_ONE = tl.constexpr(0x3F800000)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)
_HID_DEFECT = tl.constexpr(HID_DEFECT)
_HID_NUMBER = tl.constexpr(HID_NUMBER)


@triton.jit
def _floor_among(low, min_p, top_k, top_p, total, weight, mask, vocab_size):
    """Bits of the smallest weight that the filters keep; all of those are candidates."""
    bits = tl.where(mask, bits_of(weight), -1)
    floor = bits_of(min_p)
    if (top_k > 0) & (top_k < vocab_size):
        floor = tl.maximum(floor, lowest(low, top_k.to(tl.int64), bits, mask.to(tl.int64)))
    if top_p < 1:
        mass = tl.where(bits >= floor, mass_of(weight), 0)
        if floor > 0:
            total = tl.sum(mass, axis=0)
        floor = tl.maximum(floor, lowest(low, share_of(top_p, total), bits, mass))
    return floor


@triton.jit
def _weights(row_ptr, start, temperature, best, vocab_size, BLOCK: tl.constexpr):
    """One block of a row, again: weights, their bits (-1 past the vocabulary)."""
    offs = start + tl.arange(0, BLOCK)
    weight = tl.exp(load_scaled(row_ptr, offs, vocab_size, temperature) - best)
    return weight, tl.where(offs < vocab_size, bits_of(weight), -1)


@triton.jit
def _amount_above(
    threshold,
    limit,
    row_ptr,
    temperature,
    best,
    vocab_size,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count or mass, in a whole row, of the weights above a threshold and at least the limit."""
    amount = tl.zeros((), tl.int64)
    for start in range(0, vocab_size, BLOCK):
        weight, bits = _weights(row_ptr, start, temperature, best, vocab_size, BLOCK)
        each = mass_of(weight) if IS_MASS else tl.full((BLOCK,), 1, tl.int64)
        amount += tl.sum(tl.where((bits > threshold) & (bits >= limit), each, 0), axis=0)
    return amount


@triton.jit
def _lowest_of_row(
    low,
    bound,
    limit,
    row_ptr,
    temperature,
    best,
    vocab_size,
    IS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`lowest` over a whole row, by plain bisection."""
    high = low * 0 + _BITS_OF_ONE
    while high - low > 1:
        middle = (low + high) // 2
        amount = _amount_above(
            middle, limit, row_ptr, temperature, best, vocab_size, IS_MASS, BLOCK
        )
        high = tl.where(amount < bound, middle, high)
        low = tl.where(amount < bound, low, middle)
    return high


@triton.jit
def _floor_of_row(
    low, min_p, top_k, top_p, total, row_ptr, temperature, best, vocab_size, BLOCK: tl.constexpr
):
    """`_floor_among` for a row with too many candidates."""
    floor = bits_of(min_p)
    if (top_k > 0) & (top_k < vocab_size):
        kth = _lowest_of_row(
            low, top_k.to(tl.int64), 0, row_ptr, temperature, best, vocab_size, False, BLOCK
        )
        floor = tl.maximum(floor, kth)
    if top_p < 1:
        if floor > 0:
            total = _amount_above(-1, floor, row_ptr, temperature, best, vocab_size, True, BLOCK)
        bound = share_of(top_p, total)
        nucleus = _lowest_of_row(
            low, bound, floor, row_ptr, temperature, best, vocab_size, True, BLOCK
        )
        floor = tl.maximum(floor, nucleus)
    return floor


@triton.jit
def _join(best_ptr, score_ptr, token_ptr, n, num_blocks, temperature, BLOCKS: tl.constexpr):
    """The winner of a row without filters from the winners of its blocks."""
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    offs = n * num_blocks + blocks
    best = tl.load(best_ptr + offs, mask=mask, other=float("-inf"))
    score = tl.load(score_ptr + offs, mask=mask, other=0.0)
    # the blocks' scores are relative to their own best
    raced = tl.where(mask, score * tl.exp(best - tl.max(best, axis=0)), -1.0)
    _, block = tl.max(
        tl.where(temperature > 0, raced, best),
        axis=0,
        return_indices=True,
        return_indices_tie_break_left=True,
    )
    return tl.load(token_ptr + n * num_blocks + block)


@triton.jit
def _race(weight, noise, is_kept):
    """-> the best score of the tokens that are kept, and its place."""
    score = tl.where(is_kept, weight / noise, -1.0)
    return tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def _choose_filtered(
    row_ptr,
    n,
    temperature,
    min_p,
    top_k,
    top_p,
    seed,
    position,
    best,
    pivot,
    num_above,
    total,
    weight_ptr,
    id_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The token of a row with filters."""
    token = tl.zeros((), tl.int32)
    if num_above <= CANDIDATES:
        offs = tl.arange(0, CANDIDATES)
        mask = offs < num_above
        weight = tl.load(weight_ptr + n * CANDIDATES + offs, mask=mask, other=0.0)
        floor = _floor_among(pivot, min_p, top_k, top_p, total, weight, mask, vocab_size)
        ids = tl.load(id_ptr + n * CANDIDATES + offs, mask=mask, other=0)
        noise = exponential_of(seed, position, ids)
        _, place = _race(weight, noise, mask & (bits_of(weight) >= floor))
        token = tl.load(id_ptr + n * CANDIDATES + place)
    else:
        floor = _floor_of_row(
            pivot, min_p, top_k, top_p, total, row_ptr, temperature, best, vocab_size, BLOCK
        )
        most = tl.zeros((), tl.float32) - 1.0
        for start in range(0, vocab_size, BLOCK):
            weight, bits = _weights(row_ptr, start, temperature, best, vocab_size, BLOCK)
            noise = exponential_from(seed, position, start, BLOCK)
            score, place = _race(weight, noise, bits >= floor)
            token = tl.where(score > most, start + place, token)
            most = tl.maximum(score, most)
    return token


@triton.jit
def _flaw(best, mark):
    """Return the number of the row's defect, from its best logit and its mark."""
    hid_number = (mark & _HID_NUMBER) != 0
    of_nothing = tl.where(hid_number, _NOTHING_ALLOWED, _NOT_FINITE)
    is_broken = (best == float("inf")) | ((mark & _HID_DEFECT) != 0)
    return tl.where(is_broken, _NOT_FINITE, tl.where(best == float("-inf"), of_nothing, 0))


@triton.jit
def choose_kernel(
    logits_ptr,  # [N, V]
    stride_n,
    idx_mapping_ptr,  # [N]
    temperature_ptr,  # [R], as the next four
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    positions_ptr,  # [N]
    marks_ptr,  # [N] or None
    best_ptr,  # [N, blocks], as the next two
    score_ptr,
    token_ptr,
    pivot_ptr,  # [N], as the next two; this one and the next four None when no row has a filter
    num_above_ptr,
    total_ptr,
    weight_ptr,  # [N, CANDIDATES]
    id_ptr,  # [N, CANDIDATES]
    out_ptr,  # [2, N] out
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + n).to(tl.int64)
    token = tl.zeros((), tl.int32)
    flaw = tl.zeros((), tl.int32)
    if row >= 0:
        blocks = tl.arange(0, BLOCKS)
        bests_ptr = best_ptr + n * num_blocks + blocks
        best = tl.max(tl.load(bests_ptr, mask=blocks < num_blocks, other=float("-inf")), axis=0)
        mark = tl.zeros((), tl.int32)
        if marks_ptr is not None:
            mark = tl.load(marks_ptr + n)
        flaw = _flaw(best, mark)
        if flaw == 0:
            temperature = tl.load(temperature_ptr + row)
            is_filtered = False
            if pivot_ptr is not None:
                pivot = tl.load(pivot_ptr + n)
                is_filtered = pivot >= -1
                if is_filtered:
                    token = _choose_filtered(
                        logits_ptr + n * stride_n,
                        n,
                        temperature,
                        tl.load(min_p_ptr + row),
                        tl.load(top_k_ptr + row),
                        tl.load(top_p_ptr + row),
                        tl.load(seed_ptr + row),
                        tl.load(positions_ptr + n),
                        best,
                        pivot,
                        tl.load(num_above_ptr + n),
                        tl.load(total_ptr + n),
                        weight_ptr,
                        id_ptr,
                        vocab_size,
                        BLOCK,
                        CANDIDATES,
                    )
            if is_filtered == False:  # noqa: E712 - `not` of a tensor yields a bool
                token = _join(best_ptr, score_ptr, token_ptr, n, num_blocks, temperature, BLOCKS)
    tl.store(out_ptr + n, token.to(tl.int64))
    tl.store(out_ptr + tl.num_programs(0) + n, flaw.to(tl.int64))
