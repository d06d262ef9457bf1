"""Work of the ops that go over activations once: norms, activations, rope, KV writes."""

import math

import torch

from benchmarks.ops.batch import Batch
from benchmarks.ops.work import Dimensions, Work, size_of
from tokenmesh.kernels import gelu_mul, kv_write, rms_norm, rope, silu_mul

_EPS = 1e-6
_PAGE_SIZE = 16
_THETA = 10_000.0


def rms_norm_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """The norm before a layer's attention or MLP."""
    x = torch.randn(batch.num_tokens, sizes.hidden, device=device).to(dtype)
    weight = torch.randn(sizes.hidden, device=device)
    narrow = weight.to(dtype)
    return Work(
        run=lambda: rms_norm.rms_norm(x, weight, _EPS),
        reference=lambda: rms_norm.rms_norm_reference(x, weight, _EPS),
        torch_way=lambda: torch.nn.functional.rms_norm(x, (sizes.hidden,), narrow, _EPS),
        num_bytes=2 * size_of(x) + size_of(weight),
        num_flops=0,
        tolerance=rms_norm.TOLERANCE[dtype],
    )


def silu_mul_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """The activation of a gated MLP."""
    x = torch.randn(batch.num_tokens, 2 * sizes.intermediate, device=device).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    return Work(
        run=lambda: silu_mul.silu_mul(x),
        reference=lambda: silu_mul.silu_mul_reference(x),
        torch_way=lambda: torch.nn.functional.silu(gate) * up,
        num_bytes=size_of(x) * 3 // 2,
        num_flops=0,
        tolerance=silu_mul.TOLERANCE[dtype],
    )


def gelu_mul_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """The same with tanh-approximated GELU."""
    x = torch.randn(batch.num_tokens, 2 * sizes.intermediate, device=device).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    return Work(
        run=lambda: gelu_mul.gelu_mul(x, "tanh"),
        reference=lambda: gelu_mul.gelu_mul_reference(x, "tanh"),
        torch_way=lambda: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        num_bytes=size_of(x) * 3 // 2,
        num_flops=0,
        tolerance=gelu_mul.TOLERANCE[dtype],
    )


def rope_work(batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device) -> Work:
    """Queries and keys of a layer, in place."""
    heads = sizes.heads + sizes.kv_heads
    x = torch.randn(batch.num_tokens, heads, sizes.head_dim, device=device).to(dtype)
    before = x.clone()
    positions = torch.cat(
        [torch.arange(context - query, context) for query, context in batch.sequences]
    )
    pairs = sizes.head_dim // 2
    angles = positions[:, None, None] * torch.exp(torch.arange(pairs) * (-math.log(_THETA) / pairs))
    turns = torch.polar(torch.ones_like(angles), angles).to(device)

    def run() -> torch.Tensor:
        rope.rotate(x, turns)
        return x

    return Work(
        run=run,
        reference=lambda: rope.rope_reference(before, turns),
        torch_way=None,
        num_bytes=2 * size_of(x) + size_of(turns),
        num_flops=0,
        tolerance=4 * rope.TOLERANCE[dtype],
    )


def kv_write_work(
    batch: Batch, sizes: Dimensions, dtype: torch.dtype, device: torch.device
) -> Work:
    """The new tokens' keys and values to scattered pages."""
    tokens = batch.num_tokens
    new = torch.randn(tokens, 2 * sizes.kv_heads, sizes.head_dim, device=device).to(dtype)
    num_blocks = -(-tokens // _PAGE_SIZE) + 1
    pages = torch.zeros(
        (2, num_blocks, sizes.kv_heads, _PAGE_SIZE, sizes.head_dim), dtype=dtype, device=device
    )
    order = torch.randperm(num_blocks - 1) + 1
    blocks = order.repeat_interleave(_PAGE_SIZE)[:tokens]
    offsets = torch.arange(tokens) % _PAGE_SIZE
    # slots have another form on each device: made where they are used
    slots = kv_write.slot_rows(blocks.to(device), offsets.to(device), pages.shape)

    def run() -> torch.Tensor:
        kv_write.kv_write(new, pages, slots)
        return pages

    def reference() -> torch.Tensor:
        expected = torch.zeros_like(pages)
        places = list(zip(blocks.tolist(), offsets.tolist(), strict=True))
        kv_write.kv_write_reference(new, expected, places)
        return expected

    return Work(
        run=run,
        reference=reference,
        torch_way=None,
        num_bytes=2 * size_of(new) + size_of(slots),
        num_flops=0,
        tolerance=0.0,
    )
