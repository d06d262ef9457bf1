"""Attention of long queries: prompts, and chunks of prompts behind a cached prefix.

A program takes M rows: some consecutive tokens of one batch row times the query heads of one kv
head. Tiles outside of every mask are skipped; only those at the diagonal and at the window's edge
pay for masks.
"""

import triton
import triton.language as tl

from tokenmesh.kernels.paged_attention.triton_tile import LN_2, attend, load_query


@triton.jit
def find_row(cu_q, tile, first_row, num_rows, TOKENS: tl.constexpr):
    """The row that tile number `tile` belongs to, and the number of that row's first tile.

    Row r, counted from first_row, starts at tile tokens_before(r) // TOKENS + r: at most one tile
    too many for each row, and no list of tiles to prepare.
    """
    origin = tl.load(cu_q + first_row)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(cu_q + first_row + middle) - origin) // TOKENS + middle
        if start <= tile:
            low = middle
        else:
            high = middle
    start = (tl.load(cu_q + first_row + low) - origin) // TOKENS + low
    return first_row + low, start


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def prefill_kernel(
    query,  # [T, H, D]
    keys,  # [blocks, KV_HEADS, PAGE, W]
    values,
    out,  # [T, H, DV]
    lse,  # [T, H]
    cu_q,  # [R + 1] int32
    seq_lens,  # [R] int32
    tables,  # [R, columns] int32
    sinks,  # [H]
    ends,  # [T] int32: the position after the last one that a token sees, when ENDS
    scale,
    cap,
    v_scale,
    token_stride,
    head_stride,
    table_stride,
    first_row,  # rows before it are not ours
    num_rows,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    M: tl.constexpr,
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
    ENDS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Grid (tokens // TOKENS + num_rows, KV_HEADS), TOKENS = M // GROUP."""
    TOKENS: tl.constexpr = M // GROUP
    # the last tiles of a row have the most keys: they go first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row, first_tile = find_row(cu_q, tile, first_row, num_rows, TOKENS)
    first_token = tl.load(cu_q + row)
    query_length = tl.load(cu_q + row + 1) - first_token
    offset = (tile - first_tile) * TOKENS
    if offset >= query_length:
        return

    index = tl.arange(0, M)
    in_row = offset + index // GROUP
    token = first_token + in_row
    head = kv_head * GROUP + index % GROUP
    real = (in_row < query_length) & (index < TOKENS * GROUP)
    q = load_query(query, token, head, real, token_stride, head_stride, D, P)
    start = tl.load(seq_lens + row) - query_length
    lowest = start + offset
    end_key = start + tl.minimum(offset + TOKENS, query_length)
    position = start + in_row
    last = position
    if ENDS:
        last = tl.load(ends + token, mask=real, other=0) - 1
        if SYMMETRIC:
            last = tl.minimum(last, position + WINDOW - 1)
        end_key = tl.max(tl.where(real, last, 0), 0) + 1
    acc = tl.zeros([M, PV], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) / LN_2
        total = tl.full([M], 1.0, tl.float32)
    head_offset = kv_head.to(tl.int64) * PAGE * W
    key_plane = keys + head_offset
    value_plane = values + head_offset
    table = tables + row.to(tl.int64) * table_stride

    # keys [full, diagonal) are seen by every row
    first_key = 0
    full = 0
    diagonal = tl.maximum(0, lowest + 1) // N * N
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * PAGE * W
    if WINDOW:
        first_key = tl.maximum(0, lowest - WINDOW + 1)
        full = tl.cdiv(tl.maximum(0, end_key - WINDOW), N) * N
        acc, top, total = attend(
            acc, top, total, q, position, last, first_key // N * N, full, first_key,
            end_key, key_plane, value_plane, table, scale, cap, N, W, D, P, DV, PV, PAGE,
            BLOCK_STRIDE, WINDOW, SOFTCAP, MASKED=True,
        )  # fmt: skip
        diagonal = tl.maximum(full, diagonal)
    acc, top, total = attend(
        acc, top, total, q, position, last, full, diagonal, first_key, end_key, key_plane,
        value_plane, table, scale, cap, N, W, D, P, DV, PV, PAGE, BLOCK_STRIDE, WINDOW, SOFTCAP,
        MASKED=False,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, q, position, last, diagonal, end_key, first_key, end_key, key_plane,
        value_plane, table, scale, cap, N, W, D, P, DV, PV, PAGE, BLOCK_STRIDE, WINDOW, SOFTCAP,
        MASKED=True,
    )  # fmt: skip

    total = tl.where(top == float("-inf"), 1.0, total)
    acc = acc * (v_scale / total)[:, None]
    cell = token.to(tl.int64) * (KV_HEADS * GROUP) + head
    if LSE:
        tl.store(lse + cell, (top + tl.log2(total)) * LN_2, mask=real)
    column = tl.arange(0, PV)
    tl.store(
        out + (cell * DV)[:, None] + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None] & (column < DV)[None, :],
    )
