"""Cases of qk_norm_rope_kv_write: inputs, and kernels to compile ahead of time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs, normal
from tokenmesh.kernels.qk_norm_rope_kv_write import TOLERANCE, qk_norm_rope_kv_write_reference
from tokenmesh.kernels.qk_norm_rope_kv_write.head_norm import HeadNorm
from tokenmesh.kernels.qk_norm_rope_kv_write.triton import (
    BLOCK_H,
    NORM_BEFORE_ROPE,
    NUM_WARPS,
    qk_norm_rope_kv_write,
    qk_norm_rope_kv_write_kernel,
)

PAGE_SIZE: Final = 16
BLOCKS: Final = 4
SLOTS: Final = (0, 63, 47, 17, 32)


@dataclass(frozen=True, slots=True)
class Case:
    """Shapes and parts of one case."""

    name: str
    tokens: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    pairs: int | None = 16
    norm: str | None = None
    """before or after rope"""
    is_scaled: bool = False
    scales: tuple[float, float] = (1.0, 1.0)


CASES: Final = (
    Case("plain", pairs=None),
    Case("norm-rope", heads=9, kv_heads=3, norm="before"),
    Case("rope-norm", tokens=1, heads=1, kv_heads=1, norm="after"),
    Case("partial-scaled", tokens=5, head_dim=80, pairs=10, is_scaled=True),
    Case("page-scales", norm="before", is_scaled=True, scales=(0.25, 4.0)),
    Case("empty", tokens=0, norm="before"),
)


def cases() -> list[KernelCase]:
    """All cases, run by a launcher with the qk_norm_rope_kv_write's arguments."""
    return [
        KernelCase(
            name=case.name,
            make=partial(_make, case),
            run=partial(_run, case, qk_norm_rope_kv_write),
            reference=partial(_reference, case),
            tolerance=TOLERANCE,
        )
        for case in CASES
    ]


def _make(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    all_heads = case.heads + 2 * case.kv_heads
    wide = normal((case.tokens, all_heads + 1, case.head_dim), dtype, device, generator)
    pages_shape = (2, BLOCKS, case.kv_heads, PAGE_SIZE, case.head_dim)
    inputs: Inputs = {
        # Neighbors, so that a write to a key or value head of the buffer is found.
        "query": wide[:, : case.heads],
        "keys_values": wide[:, case.heads : all_heads],
        "pages": normal(pages_shape, dtype, device, generator),
        "slots": torch.tensor(SLOTS, device=device)[: case.tokens],
        "turns": None,
        "weight": None,
        "query_scale": None,
    }
    if case.pairs is not None:
        angles = 20 * torch.rand((case.tokens, 1, case.pairs), device=device, generator=generator)
        inputs["turns"] = torch.polar(torch.full_like(angles, 1.2), angles)
    if case.norm is not None:
        shape = (case.heads + case.kv_heads, case.head_dim)
        inputs["weight"] = normal(shape, torch.float32, device, generator)
    if case.is_scaled:
        inputs["query_scale"] = 1 + torch.rand(case.tokens, device=device, generator=generator)
    return inputs


def _qkv(a: Inputs) -> torch.Tensor:
    """The buffer that queries, keys and values are views of."""
    tokens, heads, head_dim = a["query"].shape
    shape = (tokens, heads + a["keys_values"].shape[1], head_dim)
    return torch.as_strided(a["query"], shape, a["query"].stride())


def _norm(case: Case, a: Inputs) -> HeadNorm | None:
    if a["weight"] is None:
        return None
    return HeadNorm(a["weight"], 1e-5, is_after_rope=case.norm == "after")


def _run(case: Case, op: Callable[..., torch.Tensor], a: Inputs) -> Outputs:
    norm = _norm(case, a)
    query = op(_qkv(a), a["pages"], a["slots"], a["turns"], norm, a["query_scale"], *case.scales)
    return {"query": query, "pages": a["pages"]}


def _reference(case: Case, a: Inputs) -> Outputs:
    slots = [divmod(slot, PAGE_SIZE) for slot in a["slots"].tolist()]
    query = qk_norm_rope_kv_write_reference(
        _qkv(a), a["pages"], slots, a["turns"], _norm(case, a), a["query_scale"], *case.scales
    )
    return {"query": query, "pages": a["pages"]}


def compilations() -> list[Compilation]:
    """Qwen3 8B; Llama 3 8B with 8-bit pages; a scaled query, half of each head turned."""
    return [
        _compilation("norm-rope", heads=32, kv_heads=8, norm=NORM_BEFORE_ROPE.value),
        _compilation("rope-fp8", heads=32, kv_heads=8, pages="*fp8e4nv", limit=448.0),
        _compilation("partial-scaled", heads=14, kv_heads=2, head_dim=64, has_scale=True),
    ]


def _compilation(
    name: str,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    norm: int = 0,
    has_scale: bool = False,
    pages: str = "*bf16",
    limit: float = 0.0,
) -> Compilation:
    return Compilation(
        name=name,
        kernel=qk_norm_rope_kv_write_kernel,
        signature={
            "qkv_ptr": "*bf16",
            "pages_ptr": pages,
            "slots_ptr": "*i64",
            "turns_ptr": "*fp32",
            "weight_ptr": "*fp32",
            "query_scale_ptr": "*fp32",
            "stride_token": "i32",
            "stride_plane": "i64",
            "eps": "fp32",
            "k_inverse_scale": "fp32",
            "v_inverse_scale": "fp32",
        },
        constants={
            "HEADS": heads,
            "NORM": norm,
            "ROTARY": head_dim // 2 if has_scale else head_dim,
            "HAS_SCALE": has_scale,
            "KV_HEADS": kv_heads,
            "PAGE": 16,
            "D": head_dim,
            "LIMIT": limit,
            "BLOCK_H": BLOCK_H,
            "BLOCK_D": head_dim,
        },
        divisible_by_16=(
            *("qkv_ptr", "pages_ptr", "slots_ptr", "turns_ptr", "weight_ptr", "query_scale_ptr"),
            *("stride_token", "stride_plane"),
        ),
        num_warps=NUM_WARPS,
        limits=CompileLimits(max_registers=80, max_shared_bytes=1024),
        required=(r"LDG\.E\.128", r"STG\.E\.(128|64)"),
        forbidden=(r"STG\.E\.U?(8|16)\b",),
    )
