"""Loads of tokens' vectors for the kernels of gated_delta."""

import triton
import triton.language as tl


@triton.jit
def load_key(ptr, token, offs_k, mask, stride, head, scale, DK: tl.constexpr, NORM: tl.constexpr):
    """One head's vectors [n, BLOCK_K] of q or k in float32, divided by their lengths if NORM.

    token [n, 1] int64, offs_k [1, BLOCK_K]; zeros where mask is not set.
    """
    x = tl.load(ptr + token * stride + head * DK + offs_k, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = x * tl.math.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]
    return x * scale


@triton.jit
def load_log_decay(
    ptr, token, offs_k, is_token, mask, stride, head, DK: tl.constexpr, CHANNEL: tl.constexpr
):
    """[n, BLOCK_K] with a gate of each channel, else [n, 1]; zeros where masked.

    is_token [n, 1] is the mask of tokens alone.
    """
    if CHANNEL:
        g = tl.load(ptr + token * stride + head * DK + offs_k, mask=mask, other=0.0)
    else:
        g = tl.load(ptr + token * stride + head, mask=is_token, other=0.0)
    return g.to(tl.float32)
