"""Long rows in chunks: first each chunk on its own, all side by side, then from chunk to chunk.

`solve_kernel` leaves what does not depend on the state: the inverse of a chunk's triangular system
and the products of its queries and keys. `scan_kernel` takes a row's chunks one after the other,
with a part of one head's state in registers.
"""

import triton
import triton.language as tl

from tokenmesh.kernels.gated_delta.triton_tokens import load_key, load_log_decay
from tokenmesh.kernels.state_rows.triton_chunk import find_chunk, running_sum


@triton.jit
def _product(left, right, TYPE: tl.constexpr):
    """left @ right in float32, of operands rounded to the type of the activations."""
    return tl.dot(left.to(TYPE), right.to(TYPE), input_precision="ieee")


@triton.jit
def _fallen(decay, place, CHANNEL: tl.constexpr):
    """The logarithm of all decays up to each token, of a head [CHUNK, 1] or of each channel."""
    if CHANNEL:
        return tl.cumsum(decay, axis=0)
    else:
        return running_sum(decay, place)


@triton.jit
def _head_products(key, query, fallen, TYPE: tl.constexpr):
    """key_i . key_j and query_i . key_j times the decay from j to i; anything for j > i.

    fallen [CHUNK, 1]: the logarithm of all decays up to a token. Both [CHUNK, CHUNK].
    """
    between = tl.exp(tl.minimum(fallen - tl.trans(fallen), 0.0))
    keys = between * _product(key, tl.trans(key), TYPE)
    return keys, between * _product(query, tl.trans(key), TYPE)


@triton.jit
def _channel_products(
    key,
    query,
    fallen,
    place,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TYPE: tl.constexpr,
):
    """The same where each channel decays by itself: fallen [CHUNK, BLOCK_K].

    Level by level the later half of some tokens meets the earlier half. Decays are counted from
    where the later half begins, so that none is above 1.
    """
    column = tl.trans(place)
    keys = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    queries = tl.where(place == column, tl.sum(query * key, axis=1)[:, None], keys)
    half = 1
    for _ in range(LEVELS):
        is_late = (place // half) % 2 == 1
        border = place // (2 * half) * (2 * half) + half
        border = tl.gather(fallen, tl.broadcast_to(border, [CHUNK, BLOCK_K]), axis=0)
        late = tl.where(is_late, tl.exp(tl.minimum(fallen - border, 0.0)), 0.0)
        early = tl.where(is_late, 0.0, tl.exp(tl.minimum(border - fallen, 0.0)))
        early = tl.trans(key * early)
        is_pair = place // (2 * half) == column // (2 * half)
        keys += tl.where(is_pair, _product(key * late, early, TYPE), 0.0)
        queries += tl.where(is_pair, _product(query * late, early, TYPE), 0.0)
        half *= 2
    return keys, queries


@triton.jit
def _unit_lower_inverse(
    matrix, place, CHUNK: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr
):
    """The inverse of 1 + matrix [CHUNK, CHUNK], which is 0 on and above its diagonal.

    Of blocks of 1 token, then of 2, 4, ...: as exact as solving row by row.
    """
    column = tl.trans(place)
    inverse = tl.where(place == column, 1.0, tl.zeros([CHUNK, CHUNK], dtype=tl.float32))
    half = 1
    for _ in range(LEVELS):
        is_below = ((place // half) % 2 == 1) & (place // half == column // half + 1)
        below = tl.where(is_below, matrix, 0.0)
        found = tl.dot(inverse, below, input_precision=EXACT)
        inverse -= tl.dot(found, inverse, input_precision=EXACT)
        half *= 2
    return inverse


@triton.jit(do_not_specialize=["num_rows"])
def solve_kernel(
    q,  # [T, HK, DK]
    k,
    g,  # [T, HV] or [T, HV, DK]
    beta,  # [T, HV]
    inverses,  # [T, HV, CHUNK] float32, written: a row of its chunk's inverse
    products,  # [T, HV, CHUNK] float32, written: the token's query with its chunk's keys
    cu_q,  # [R + 1] int32
    starts,  # [R] int32
    num_rows,
    scale,
    stride_q,
    stride_k,
    stride_g,
    stride_beta,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXACT: tl.constexpr,
):
    TYPE: tl.constexpr = q.dtype.element_ty
    row, first, length, chunk = find_chunk(cu_q, tl.program_id(0), num_rows, CHUNK)
    offset = chunk * CHUNK - tl.maximum(tl.load(starts + row), 0) % CHUNK
    if length > FEW:
        if offset < length:
            head = tl.program_id(1)
            key_head = head // (HV // HK)
            place = tl.arange(0, CHUNK)[:, None]
            column = tl.arange(0, CHUNK)[None, :]
            offs_k = tl.arange(0, BLOCK_K)[None, :]
            is_token = (offset + place >= 0) & (offset + place < length)
            mask = is_token & (offs_k < DK)
            token = (first + offset + place).to(tl.int64)
            key = load_key(k, token, offs_k, mask, stride_k, key_head, 1.0, DK, NORM)
            query = load_key(q, token, offs_k, mask, stride_q, key_head, scale, DK, NORM)
            decay = load_log_decay(g, token, offs_k, is_token, mask, stride_g, head, DK, CHANNEL)
            fallen = _fallen(decay, place, CHANNEL)
            if CHANNEL:
                keys, queries = _channel_products(
                    key, query, fallen, place, CHUNK, LEVELS, BLOCK_K, TYPE
                )
            else:
                keys, queries = _head_products(key, query, fallen, TYPE)
            queries = tl.where(place >= column, queries, 0.0)
            kept = (token * HV + head) * CHUNK + column
            is_kept = is_token & (column < CHUNK)
            tl.store(products + kept, queries, mask=is_kept)
            rate = tl.load(beta + token * stride_beta + head, mask=is_token, other=0.0)
            system = tl.where(place > column, rate.to(tl.float32) * keys, 0.0)
            inverse = _unit_lower_inverse(system, place, CHUNK, LEVELS, EXACT)
            tl.store(inverses + kept, inverse, mask=is_kept)


@triton.jit
def scan_kernel(
    q,  # [T, HK, DK]
    k,
    v,  # [T, HV, DV]
    g,  # [T, HV] or [T, HV, DK]
    beta,  # [T, HV]
    inverses,  # [T, HV, CHUNK] float32
    products,  # [T, HV, CHUNK] float32
    state,  # [slots, HV, DK, DV] float32, read and written
    out,  # [T, HV, DV]
    slots,  # [R]
    cu_q,  # [R + 1] int32
    starts,  # [R] int32
    scale,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_beta,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CHANNEL: tl.constexpr,
    NORM: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    TYPE: tl.constexpr = q.dtype.element_ty
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(cu_q + row)
    length = tl.load(cu_q + row + 1) - first
    if length > FEW:
        key_head = head // (HV // HK)
        place = tl.arange(0, CHUNK)[:, None]
        column = tl.arange(0, CHUNK)[None, :]
        offs_k = tl.arange(0, BLOCK_K)
        offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
        is_state = (offs_k < DK)[:, None] & (offs_v < DV)
        slot = tl.load(slots + row).to(tl.int64)
        held_ptrs = state + (slot * HV + head) * DK * DV + offs_k[:, None] * DV + offs_v
        start = tl.maximum(tl.load(starts + row), 0)
        known_k = tl.where(start > 0, DK, 0)  # nothing of a new row's slot
        held = tl.load(held_ptrs, mask=is_state & (offs_k < known_k)[:, None], other=0.0)
        offs_k = offs_k[None, :]

        for offset in range(-(start % CHUNK), length, CHUNK):
            is_token = (offset + place >= 0) & (offset + place < length)
            mask = is_token & (offs_k < DK)
            token = (first + offset + place).to(tl.int64)
            decay = load_log_decay(g, token, offs_k, is_token, mask, stride_g, head, DK, CHANNEL)
            fallen = _fallen(decay, place, CHANNEL)
            total = tl.sum(decay, axis=0)[None, :]
            is_value = is_token & (offs_v < DV)
            kept = (token * HV + head) * CHUNK + column
            is_kept = is_token & (column < CHUNK)

            key = load_key(k, token, offs_k, mask, stride_k, key_head, 1.0, DK, NORM)
            known = _product(key * tl.exp(fallen), held, TYPE)
            value = tl.load(v + token * stride_v + head * DV + offs_v, mask=is_value, other=0.0)
            rate = tl.load(beta + token * stride_beta + head, mask=is_token, other=0.0)
            wanted = rate.to(tl.float32) * (value.to(tl.float32) - known)
            inverse = tl.load(inverses + kept, mask=is_kept, other=0.0)
            change = _product(inverse, wanted, TYPE)
            query = load_key(q, token, offs_k, mask, stride_q, key_head, scale, DK, NORM)
            result = _product(query * tl.exp(fallen), held, TYPE)
            met = tl.load(products + kept, mask=is_kept, other=0.0)
            result += _product(met, change, TYPE)
            out_ptrs = out + (token * HV + head) * DV + offs_v
            tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=is_value)
            left = tl.trans(key * tl.exp(tl.minimum(total - fallen, 0.0)))
            held = held * tl.trans(tl.exp(total)) + _product(left, change, TYPE)
        tl.store(held_ptrs, held, mask=is_state)
