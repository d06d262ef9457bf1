"""Rows of few tokens, token by token: a program keeps a part of one head's state in registers."""

import triton
import triton.language as tl

from tokenmesh.kernels.gated_delta.triton_tokens import load_key, load_log_decay


@triton.jit
def recurrent_kernel(
    q,  # [T, HK, DK]
    k,
    v,  # [T, HV, DV]
    g,  # [T, HV] or [T, HV, DK]
    beta,  # [T, HV]
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
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(cu_q + row)
    length = tl.load(cu_q + row + 1) - first
    if length <= FEW:
        if length > 0:
            offs_k = tl.arange(0, BLOCK_K)
            offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
            key_head = head // (HV // HK)
            is_k = (offs_k < DK)[None, :]
            is_state = (offs_k < DK)[:, None] & (offs_v < DV)[None, :]
            slot = tl.load(slots + row).to(tl.int64)
            held_ptrs = state + (slot * HV + head) * DK * DV
            held_ptrs += offs_k[:, None] * DV + offs_v[None, :]
            known_k = tl.where(tl.load(starts + row) > 0, DK, 0)  # nothing of a new row's slot
            held = tl.load(held_ptrs, mask=is_state & (offs_k < known_k)[:, None], other=0.0)

            for number in range(length):
                token = (first + number).to(tl.int64)
                one = token + tl.zeros([1, 1], dtype=tl.int64)
                is_token = one >= 0
                mask = is_token & is_k
                place = offs_k[None, :]
                query = load_key(q, one, place, mask, stride_q, key_head, scale, DK, NORM)
                key = load_key(k, one, place, mask, stride_k, key_head, 1.0, DK, NORM)
                decay = load_log_decay(g, one, place, is_token, mask, stride_g, head, DK, CHANNEL)
                query = tl.trans(query)
                key = tl.trans(key)
                held = held * tl.exp(tl.trans(decay))
                value = tl.load(
                    v + token * stride_v + head * DV + offs_v, mask=offs_v < DV, other=0.0
                )
                change = value.to(tl.float32) - tl.sum(held * key, axis=0)
                change = change * tl.load(beta + token * stride_beta + head).to(tl.float32)
                held = held + key * change[None, :]
                result = tl.sum(held * query, axis=0)
                out_ptrs = out + (token * HV + head) * DV + offs_v
                tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=offs_v < DV)
            tl.store(held_ptrs, held, mask=is_state)
