"""The inner loop that both attention kernels share: one block of query rows over a range of keys.

M query rows, N keys a tile, W width of a page's rows, D of keys and DV of values among them, P and
PV those padded to a power of two. Scores are kept in
base 2 (times log2 e), so that the exponential is the one instruction the hardware has.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def load_query(
    query, token, head, real, token_stride, head_stride, D: tl.constexpr, P: tl.constexpr
):
    """Rows of queries [M, P], zero where `real` is false and beyond D."""
    column = tl.arange(0, P)
    start = token.to(tl.int64) * token_stride + head * head_stride
    mask = real[:, None] & (column < D)[None, :]
    return tl.load(query + start[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def attend(
    acc,  # [M, PV] float32: sum of p * v so far
    top,  # [M] float32: largest score so far, -inf before the first
    total,  # [M] float32: sum of p so far
    q,  # [M, P]
    position,  # [M] int32
    last,  # [M] int32: the last key that a row sees
    begin,  # first key of the first tile, a multiple of N
    end,  # tiles up to this key
    first_key,  # no key below this one is read,
    end_key,  # and none from this one on
    keys,  # this head's plane of pages; values likewise
    values,
    table,  # this row's block ids
    scale,  # logits in base 2 per unit of q.k; with a softcap, its fraction per unit of q.k
    cap,  # the softcap in base 2
    N: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    DV: tl.constexpr,
    PV: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of every tile
):
    """One pass of online softmax; returns acc, top, total.

    Keys that no row may see are not loaded but zero, so that what lies there, NaN included, never
    meets a weight of zero. tf32x3 is as good as float32 and says nothing about narrower types.
    """
    column = tl.arange(0, P)
    value_column = tl.arange(0, PV)
    for start in tl.range(begin, end, N):
        key = start + tl.arange(0, N)
        known = (key >= first_key) & (key < end_key)
        if N <= PAGE:
            # `start` may lie outside of the table only when no tile is left
            block = tl.load(table + start // PAGE).to(tl.int64)
            k_at = keys + block * BLOCK_STRIDE + (start % PAGE + tl.arange(0, N)) * W
            v_at = values + block * BLOCK_STRIDE + (start % PAGE + tl.arange(0, N)) * W
        else:
            if MASKED:
                block = tl.load(table + key // PAGE, mask=known, other=0).to(tl.int64)
            else:
                block = tl.load(table + key // PAGE).to(tl.int64)
            offset = block * BLOCK_STRIDE + (key % PAGE) * W
            k_at = keys + offset
            v_at = values + offset
        k_at = k_at[None, :] + column[:, None]
        v_at = v_at[:, None] + value_column[None, :]
        if MASKED:
            k = tl.load(k_at, mask=known[None, :] & (column < D)[:, None], other=0.0)
            v = tl.load(v_at, mask=known[:, None] & (value_column < DV)[None, :], other=0.0)
        elif P == D and PV == DV:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(column < D)[:, None], other=0.0)
            v = tl.load(v_at, mask=(value_column < DV)[None, :], other=0.0)
        score = tl.dot(q, k.to(q.dtype), input_precision="tf32x3")
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which saturates instead of overflowing
            score = cap - 2 * cap / (tl.exp2(score * (2 * scale * LOG2_E)) + 1)
            factor = 1.0
        else:
            factor = scale
        if MASKED:
            seen = key[None, :] <= last[:, None]
            if WINDOW:
                seen &= key[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))  # what is seen is known
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        shift = new_top
        if MASKED:
            # a row that has seen nothing yet: -inf minus -inf is NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score * factor - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="tf32x3")
        top = new_top
    return acc, top, total
