"""mamba2 on a GPU: a program keeps a part of one head's state in registers.

Rows of few tokens go token by token, others chunk by chunk. Both kernels are launched over all rows
when a step has long ones, and each leaves the other's rows alone: the host need not know which rows
are long.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from tokenmesh.kernels.alignment import assert_aligned_rows
from tokenmesh.kernels.fusion import FUSED
from tokenmesh.kernels.mamba2.cpu import CHUNK
from tokenmesh.kernels.state_rows import StateRows
from tokenmesh.kernels.state_rows.triton_chunk import running_sum

FEW: Final = 8
"""Rows of up to this many tokens go token by token: 1, or 1 + drafts."""
LAUNCH: Final = {"num_warps": 8, "num_stages": 1}
WIDE: Final = 128
"""Most columns of states for which the inputs of a whole chunk fit the registers."""


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    rows: StateRows,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """See the package. Heads of a token must be next to each other."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tokens = [each.flatten(1) for each in (x, dt, B, C)]
    gate = None if z is None else z.flatten(1)
    assert_aligned_rows(*(each for each in (tokens[0], *tokens[2:], gate) if each is not None))
    assert tokens[1].stride(1) == 1, "time steps of a token are not contiguous"
    assert state.is_contiguous(), "a state is changed in place"
    heads, dim, size = state.shape[1:]
    constants = tile_of(dim, size)
    grid = (len(rows.slots), heads, triton.cdiv(dim, constants["BLOCK_P"]))
    for kernel in (recurrent_kernel, scan_kernel)[: 1 if rows.longest <= FEW else 2]:
        kernel[grid](
            *tokens,
            gate,
            A,
            D,
            dt_bias,
            state,
            out,
            rows.slots,
            rows.cu_q,
            rows.starts,
            *(each.stride(0) for each in tokens),
            0 if gate is None else gate.stride(0),
            *dt_limit,
            GROUPS=B.shape[1],
            HEADS=heads,
            P=dim,
            N=size,
            HAS_D=D is not None,
            HAS_Z=z is not None,
            HAS_BIAS=dt_bias is not None,
            **constants,
            **LAUNCH,
            **FUSED,
        )
    return out


def tile_of(dim: int, size: int) -> dict[str, int]:
    """Constants of both kernels; products need 16 in each direction."""
    block_n = max(16, triton.next_power_of_2(size))
    most, chunk = (64, CHUNK) if block_n <= WIDE else (16, CHUNK // 2)
    block_p = min(most, max(16, triton.next_power_of_2(dim)))
    return {"FEW": FEW, "CHUNK": chunk, "BLOCK_P": block_p, "BLOCK_N": block_n}


@triton.jit
def _time_step(
    dt_ptr, bias_ptr, token, is_token, stride, head, least, most, HAS_BIAS: tl.constexpr
):
    """Time steps of tokens [n, 1] in float32; 0 where masked, which leaves a state unchanged."""
    dt = tl.load(dt_ptr + token * stride + head, mask=is_token, other=0.0).to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(bias_ptr + head).to(tl.float32)
    dt = tl.maximum(dt, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(dt)))  # softplus
    dt = tl.minimum(tl.maximum(dt, least), most)
    return tl.where(is_token, dt, 0.0)


@triton.jit
def _finish(
    value, x, z_ptr, d_ptr, token, offs_p, mask, stride_z, head,
    P: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr,
):  # fmt: skip
    """value, x [n, BLOCK_P] -> the outputs."""
    if HAS_D:
        value += tl.load(d_ptr + head).to(tl.float32) * x
    if HAS_Z:
        z = tl.load(z_ptr + token * stride_z + head * P + offs_p, mask=mask, other=0.0)
        z = z.to(tl.float32)
        value = value * z * tl.sigmoid(z)
    return value


@triton.jit
def recurrent_kernel(
    x_ptr,  # [T, HEADS * P]
    dt_ptr,  # [T, HEADS]
    b_ptr,  # [T, GROUPS * N]
    c_ptr,
    z_ptr,  # [T, HEADS * P]; None: HAS_Z is false
    a_ptr,  # [HEADS]
    d_ptr,  # [HEADS]; None: HAS_D is false
    bias_ptr,  # [HEADS]; None: HAS_BIAS is false
    state_ptr,  # [slots, HEADS, P, N] float32, read and written
    out_ptr,  # [T, HEADS * P]
    slots_ptr,  # [R]
    cu_q_ptr,  # [R + 1] int32
    starts_ptr,  # [R] int32
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_z,
    least,
    most,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(cu_q_ptr + row)
    length = tl.load(cu_q_ptr + row + 1) - first
    if length <= FEW:
        if length > 0:
            group = head // (HEADS // GROUPS)
            offs_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
            offs_n = tl.arange(0, BLOCK_N)
            is_p, is_n = offs_p < P, offs_n < N
            is_state = is_p[:, None] & is_n[None, :]
            place = (tl.load(slots_ptr + row).to(tl.int64) * HEADS + head) * P * N
            held_ptrs = state_ptr + place + offs_p[:, None] * N + offs_n[None, :]
            known_n = tl.where(tl.load(starts_ptr + row) > 0, N, 0)  # nothing of a new row's slot
            held = tl.load(held_ptrs, mask=is_state & (offs_n < known_n)[None, :], other=0.0)
            rate = tl.load(a_ptr + head).to(tl.float32)

            for number in range(length):
                token = (first + number).to(tl.int64)
                one = token + tl.zeros([1], dtype=tl.int64)
                dt = _time_step(
                    dt_ptr, bias_ptr, one, one >= 0, stride_dt, head, least, most, HAS_BIAS
                )
                x = tl.load(x_ptr + token * stride_x + head * P + offs_p, mask=is_p, other=0.0)
                x = x.to(tl.float32)
                gain = tl.load(b_ptr + token * stride_b + group * N + offs_n, mask=is_n, other=0.0)
                read = tl.load(c_ptr + token * stride_c + group * N + offs_n, mask=is_n, other=0.0)
                held = held * tl.exp(dt * rate)[:, None]
                held += (dt * x)[:, None] * gain.to(tl.float32)[None, :]
                value = tl.sum(held * read.to(tl.float32)[None, :], axis=1)
                value = _finish(
                    value, x, z_ptr, d_ptr, token, offs_p, is_p, stride_z, head, P, HAS_D, HAS_Z
                )
                out_ptrs = out_ptr + (token * HEADS + head) * P + offs_p
                tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=is_p)
            tl.store(held_ptrs, held, mask=is_state)


@triton.jit
def _product(left, right, TYPE: tl.constexpr):
    """left @ right in float32, of operands rounded to the type of the activations."""
    return tl.dot(left.to(TYPE), right.to(TYPE), input_precision="ieee")


@triton.jit
def scan_kernel(
    x_ptr,  # as in recurrent_kernel
    dt_ptr,
    b_ptr,
    c_ptr,
    z_ptr,
    a_ptr,
    d_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    cu_q_ptr,
    starts_ptr,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_z,
    least,
    most,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(cu_q_ptr + row)
    length = tl.load(cu_q_ptr + row + 1) - first
    if length > FEW:
        group = head // (HEADS // GROUPS)
        number = tl.arange(0, CHUNK)[:, None]
        offs_p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        offs_n = tl.arange(0, BLOCK_N)[None, :]
        is_state = (offs_p < P)[:, None] & (offs_n < N)
        place = (tl.load(slots_ptr + row).to(tl.int64) * HEADS + head) * P * N
        held_ptrs = state_ptr + place + offs_p[:, None] * N + offs_n
        start = tl.maximum(tl.load(starts_ptr + row), 0)
        known_n = tl.where(start > 0, N, 0)  # nothing of a new row's slot
        held = tl.load(held_ptrs, mask=is_state & (offs_n < known_n), other=0.0)
        rate = tl.load(a_ptr + head).to(tl.float32)
        offs_p = offs_p[None, :]

        for offset in range(-(start % CHUNK), length, CHUNK):
            is_token = (offset + number >= 0) & (offset + number < length)
            token = (first + offset + number).to(tl.int64)
            is_x, is_bc = is_token & (offs_p < P), is_token & (offs_n < N)
            dt = _time_step(
                dt_ptr, bias_ptr, token, is_token, stride_dt, head, least, most, HAS_BIAS
            )
            fallen = running_sum(dt * rate, number)
            total = tl.sum(dt * rate, axis=0)[None, :]
            x = tl.load(x_ptr + token * stride_x + head * P + offs_p, mask=is_x, other=0.0)
            x = x.to(tl.float32)
            read = tl.load(c_ptr + token * stride_c + group * N + offs_n, mask=is_bc, other=0.0)
            gain = tl.load(b_ptr + token * stride_b + group * N + offs_n, mask=is_bc, other=0.0)

            between = tl.exp(tl.minimum(fallen - tl.trans(fallen), 0.0))
            weights = between * _product(read, tl.trans(gain), TYPE)
            weights = tl.where(number >= tl.trans(number), weights, 0.0)
            value = tl.exp(fallen) * _product(read, tl.trans(held), TYPE)
            value += _product(weights, dt * x, TYPE)
            left = tl.trans(dt * tl.exp(tl.minimum(total - fallen, 0.0)) * x)
            held = held * tl.exp(total) + _product(left, gain, TYPE)
            value = _finish(
                value, x, z_ptr, d_ptr, token, offs_p, is_x, stride_z, head, P, HAS_D, HAS_Z
            )
            out_ptrs = out_ptr + (token * HEADS + head) * P + offs_p
            tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=is_x)
        tl.store(held_ptrs, held, mask=is_state)
