"""Attention of short queries: decode, and the few tokens of a speculative step.

A program takes one row, one kv head, all query heads of it, and one part of the row's keys. Parts
are cut on the device from the row's own length, so that a launch recorded in a CUDA graph fits any
length: short rows leave parts without keys, and such programs end at once.
"""

import triton
import triton.language as tl

from tokenmesh.kernels.paged_attention.triton_tile import LN_2, attend, load_query


@triton.jit
def split_size(num_keys, splits, MIN_KEYS: tl.constexpr, N: tl.constexpr):
    """Keys of each part but the last, a multiple of N."""
    return tl.maximum(MIN_KEYS, tl.cdiv(tl.cdiv(num_keys, splits), N) * N)


@triton.jit
def key_range(length, query_length, WINDOW: tl.constexpr, N: tl.constexpr):
    """The first key that a row's queries see, and the multiple of N at or before it."""
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(0, length - query_length - WINDOW + 1)
    return first_key, first_key // N * N


@triton.jit
def decode_kernel(
    query,  # [T, H, D]
    keys,  # [blocks, KV_HEADS, PAGE, W]
    values,
    out,  # [T, H, DV] in query's dtype; [T, splits, H, DV] float32 when SPLIT
    lse,  # [T, H] natural log; [T, splits, H] base 2 when SPLIT
    cu_q,  # [R + 1] int32
    seq_lens,  # [R] int32
    tables,  # [R, columns] int32
    sinks,  # [H]
    scale,
    cap,
    v_scale,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    M: tl.constexpr,
    M_TILES: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    DV: tl.constexpr,
    PV: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """Grid (rows * M_TILES, KV_HEADS, splits)."""
    row = tl.program_id(0) // M_TILES
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    first_token = tl.load(cu_q + row)
    query_length = tl.load(cu_q + row + 1) - first_token
    length = tl.load(seq_lens + row)
    first_key, begin = key_range(length, query_length, WINDOW, N)
    size = split_size(length - begin, splits, MIN_KEYS, N)
    begin += split * size
    # the first part of a row without keys still has to write its zeros
    if (begin >= length) & (split > 0):
        return

    index = (tl.program_id(0) % M_TILES) * M + tl.arange(0, M)
    token = first_token + index // GROUP
    head = kv_head * GROUP + index % GROUP
    real = index < query_length * GROUP
    q = load_query(query, token, head, real, token_stride, head_stride, D, P)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        if split == 0:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
            top = sink / LN_2
            total = tl.full([M], 1.0, tl.float32)
    head_offset = kv_head.to(tl.int64) * PAGE * W
    position = length - query_length + index // GROUP
    acc, top, total = attend(
        tl.zeros([M, PV], tl.float32),
        top,
        total,
        q,
        position,
        position,
        begin,
        tl.minimum(begin + size, length),
        first_key,
        length,
        keys + head_offset,
        values + head_offset,
        tables + row.to(tl.int64) * table_stride,
        scale,
        cap,
        N=N,
        W=W,
        D=D,
        P=P,
        DV=DV,
        PV=PV,
        PAGE=PAGE,
        BLOCK_STRIDE=KV_HEADS * PAGE * W,
        WINDOW=WINDOW,
        SOFTCAP=SOFTCAP,
        MASKED=True,
    )

    total = tl.where(top == float("-inf"), 1.0, total)
    acc = acc * (v_scale / total)[:, None]
    logsum = top + tl.log2(total)
    cell = (token.to(tl.int64) * splits + split) * (KV_HEADS * GROUP) + head
    if SPLIT:
        tl.store(lse + cell, logsum, mask=real)
    elif LSE:
        tl.store(lse + cell, logsum * LN_2, mask=real)
    column = tl.arange(0, PV)
    tl.store(
        out + (cell * DV)[:, None] + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None] & (column < DV)[None, :],
    )
