"""The kernel of mla_attention: some heads of some tokens of a row over a range of keys.

A tile of latents is loaded once and is keys and values both. Scores are kept in base 2.
"""

import triton
import triton.language as tl

from tokenmesh.kernels.paged_attention.triton_decode import split_size
from tokenmesh.kernels.paged_attention.triton_prefill import find_row
from tokenmesh.kernels.paged_attention.triton_tile import LN_2


@triton.jit
def attend_latents(
    q,  # [M, R]
    q_rope,  # [M, E]
    last,  # [M] int32: the last key that a row sees
    begin,  # a multiple of N
    end,  # no key from this one on is read
    pages,  # [blocks, PAGE, R + E]
    table,  # this row's block ids
    chosen,  # this token's positions, when INDEXED; then `end` is how many they are
    scale,
    M: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """acc [M, R], top [M] and total [M] of an online softmax; top is -inf where nothing is seen."""
    acc = tl.zeros([M, R], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    column = tl.arange(0, R)
    for start in tl.range(begin, end, N):
        key = start + tl.arange(0, N)
        known = key < end
        if INDEXED:
            key = tl.load(chosen + key, mask=known, other=-1)
            known = key >= 0
            key = tl.maximum(key, 0)
        block = tl.load(table + key // PAGE, mask=known, other=0).to(tl.int64)
        at = pages + (block * PAGE + key % PAGE) * (R + E)
        # what no row may see is zero: NaN times a weight of zero would not be
        latent = tl.load(at[:, None] + column[None, :], mask=known[:, None], other=0.0).to(q.dtype)
        rope_at = at[None, :] + R + tl.arange(0, E)[:, None]
        turned = tl.load(rope_at, mask=known[None, :], other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(latent), input_precision="tf32x3")
        score = tl.dot(q_rope, turned, score, input_precision="tf32x3")
        seen = known[None, :] & (last >= 0)[:, None]
        if not INDEXED:
            seen &= key[None, :] <= last[:, None]
        score = tl.where(seen, score * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), latent, acc * shrink[:, None], input_precision="tf32x3")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_indices"])
def latent_kernel(
    query,  # [T, HEADS, R + E]
    pages,  # [blocks, PAGE, R + E]
    out,  # [T, HEADS, R] in query's dtype; [T, splits, HEADS, R] float32 when SPLIT
    lse,  # [T, HEADS] natural log; [T, splits, HEADS] base 2 when SPLIT
    cu_q,  # [rows + 1] int32
    seq_lens,  # [rows] int32
    tables,  # [rows, columns] int32
    ends,  # [T] int32, when ENDS
    indices,  # [T, num_indices] int32, when INDEXED
    scale,  # of logits in base 2, times that of stored latents
    page_scale,
    token_stride,
    head_stride,
    table_stride,
    index_stride,
    num_indices,
    first_row,  # rows before it are not ours
    num_rows,
    HEADS: tl.constexpr,
    M: tl.constexpr,
    TOKENS: tl.constexpr,  # of a tile; M // TOKENS of their heads
    N: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    PAGE: tl.constexpr,
    MAX_QUERY: tl.constexpr,  # short rows: most tokens of one; 0: long rows
    INDEXED: tl.constexpr,
    ENDS: tl.constexpr,
    LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """Grid (tiles of tokens, tiles of heads, splits)."""
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    if MAX_QUERY:
        row = tl.program_id(0) // MAX_QUERY
        offset = tl.program_id(0) % MAX_QUERY
    else:
        # the last tiles of a row have the most keys: they go first
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        row, first_tile = find_row(cu_q, tile, first_row, num_rows, TOKENS)
        offset = (tile - first_tile) * TOKENS
    first_token = tl.load(cu_q + row)
    query_length = tl.load(cu_q + row + 1) - first_token
    if offset >= query_length:
        return
    length = tl.load(seq_lens + row)

    HEADS_OF_TILE: tl.constexpr = M // TOKENS
    index = tl.arange(0, M)
    in_row = offset + index // HEADS_OF_TILE
    head = tl.program_id(1) * HEADS_OF_TILE + index % HEADS_OF_TILE
    token = (first_token + in_row).to(tl.int64)
    real = (in_row < query_length) & (head < HEADS)
    last = length - query_length + in_row
    if ENDS:
        last = tl.load(ends + token, mask=real, other=0) - 1
    last = tl.where(real, last, -1)
    begin = 0
    end = tl.max(last, 0) + 1
    if INDEXED:
        end = tl.where(end > 0, num_indices, 0)
    if SPLIT:
        size = split_size(length, splits, MIN_KEYS, N)
        begin = split * size
        # the first part of a row without keys still has to write its zeros
        if (begin >= length) & (split > 0):
            return
        end = tl.minimum(begin + size, end)

    at = query + (token * token_stride + head * head_stride)[:, None]
    q = tl.load(at + tl.arange(0, R)[None, :], mask=real[:, None], other=0.0)
    q_rope = tl.load(at + R + tl.arange(0, E)[None, :], mask=real[:, None], other=0.0)
    table = tables + row.to(tl.int64) * table_stride
    chosen = indices + (first_token + offset).to(tl.int64) * index_stride
    acc, top, total = attend_latents(
        q, q_rope, last, begin, end, pages, table, chosen, scale, M, N, R, E, PAGE, INDEXED
    )
    total = tl.where(top == float("-inf"), 1.0, total)
    cell = (token * splits + split) * HEADS + head
    logsum = top + tl.log2(total)
    if SPLIT:
        tl.store(lse + cell, logsum, mask=real)
    elif LSE:
        tl.store(lse + cell, logsum * LN_2, mask=real)
    to = out + (cell * R)[:, None] + tl.arange(0, R)[None, :]
    tl.store(to, (acc * (page_scale / total)[:, None]).to(out.dtype.element_ty), mask=real[:, None])
