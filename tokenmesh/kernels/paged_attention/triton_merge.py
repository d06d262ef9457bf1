"""Puts the parts of split rows together."""

import triton
import triton.language as tl

from tokenmesh.kernels.paged_attention.triton_decode import key_range, split_size
from tokenmesh.kernels.paged_attention.triton_tile import LN_2


@triton.jit(do_not_specialize=["splits"])
def merge_splits_kernel(
    parts,  # [T, splits, HEADS, D] float32
    part_lse,  # [T, splits, HEADS] float32, base 2
    out,  # [T, HEADS, D]
    lse,  # [T, HEADS]
    cu_q,  # [R + 1] int32
    seq_lens,  # [R] int32
    splits,
    HEADS: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    WINDOW: tl.constexpr,
    LSE: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows * MAX_QUERY, HEADS). Parts that no program wrote are not read."""
    row = tl.program_id(0) // MAX_QUERY
    index = tl.program_id(0) % MAX_QUERY
    head = tl.program_id(1)
    first_token = tl.load(cu_q + row)
    query_length = tl.load(cu_q + row + 1) - first_token
    if index >= query_length:
        return
    length = tl.load(seq_lens + row)
    _, begin = key_range(length, query_length, WINDOW, N)
    num_keys = length - begin
    used = tl.maximum(1, tl.cdiv(num_keys, split_size(num_keys, splits, MIN_KEYS, N)))

    token = (first_token + index).to(tl.int64)
    first = token * splits * HEADS + head
    every = tl.arange(0, PADDED_SPLITS)
    logs = tl.load(part_lse + first + every * HEADS, mask=every < used, other=float("-inf"))
    top = tl.max(logs, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - shift), 0)
    total = tl.where(top == float("-inf"), 1.0, total)
    column = tl.arange(0, P)
    acc = tl.zeros([P], tl.float32)
    for start in range(0, used, BLOCK):
        split = start + tl.arange(0, BLOCK)
        live = split < used
        log = tl.load(part_lse + first + split * HEADS, mask=live, other=float("-inf"))
        at = (first + split * HEADS) * D
        mask = live[:, None] & (column < D)[None, :]
        part = tl.load(parts + at[:, None] + column[None, :], mask=mask, other=0.0)
        acc += tl.sum(tl.exp2(log - shift)[:, None] * part, 0)

    cell = token * HEADS + head
    if LSE:
        tl.store(lse + cell, (top + tl.log2(total)) * LN_2)
    tl.store(out + cell * D + column, (acc / total).to(out.dtype.element_ty), mask=column < D)
