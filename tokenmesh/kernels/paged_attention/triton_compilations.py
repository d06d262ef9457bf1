"""What paged attention compiles to for a real model: kv heads 8, four query heads each."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS
from tokenmesh.kernels.paged_attention.triton_decode import decode_kernel
from tokenmesh.kernels.paged_attention.triton_merge import merge_splits_kernel
from tokenmesh.kernels.paged_attention.triton_prefill import prefill_kernel
from tokenmesh.kernels.paged_attention.triton_tiles import decode_tile, merge_tile, prefill_tile
from tokenmesh.kernels.specimen import Compilation, Limits

SM_REGISTERS = 65_536
SM_SHARED_BYTES = 228 << 10
PROGRAM_SHARED_BYTES = 1 << 10
"""What the hardware takes for itself of each program's shared memory."""
GROUP = 4
KV_HEADS = 8
ASYNC_COPY = r"LDGSTS|UTMALDG"
WARPGROUP_PRODUCT = r"HGMMA"
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv"}
TENSORS = (
    "query", "keys", "values", "out", "lse", "cu_q", "seq_lens", "tables", "sinks", "token_stride",
    "head_stride", "table_stride",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Form:
    """The choices that make a kernel of its own."""

    query: torch.dtype = torch.bfloat16
    pages: torch.dtype = torch.bfloat16
    head_dim: int = 128
    value_dim: int = 0
    """0: head_dim."""
    page_size: int = 16
    short_query: int = 1
    is_split: bool = False
    has_everything: bool = False
    """A window, a softcap, sinks, spans and the lse; otherwise none of them."""

    @property
    def signature(self) -> dict[str, str]:
        """Types of the arguments that both kernels have."""
        ints = dict.fromkeys(("cu_q", "seq_lens", "tables"), "*i32")
        strides = dict.fromkeys(("token_stride", "head_stride", "table_stride"), "i32")
        return {
            "query": TYPES[self.query],
            "keys": TYPES[self.pages],
            "values": TYPES[self.pages],
            "out": "*fp32" if self.is_split else TYPES[self.query],
            "lse": "*fp32",
            **ints,
            "sinks": TYPES[self.query],
            **dict.fromkeys(("scale", "cap", "v_scale"), "fp32"),
            **strides,
        }

    @property
    def constants(self) -> dict[str, Any]:
        """Constants that both kernels have, but for the tile."""
        return {
            "GROUP": GROUP,
            "KV_HEADS": KV_HEADS,
            "W": self.head_dim,
            "D": self.head_dim,
            "P": triton.next_power_of_2(self.head_dim),
            "DV": self.value_dim or self.head_dim,
            "PV": triton.next_power_of_2(self.value_dim or self.head_dim),
            "PAGE": self.page_size,
            "WINDOW": 1024 if self.has_everything else 0,
            "SOFTCAP": self.has_everything,
            "SINKS": self.has_everything,
            "LSE": self.has_everything,
        }


def compilations() -> list[Compilation]:
    """Both page sizes, all types, small and large heads, plain and with everything."""
    half, byte = torch.float16, torch.float8_e4m3fn
    everything = _Form(half, half, page_size=64, has_everything=True)
    return [
        _decode("decode", _Form(is_split=True), 3),
        _decode("decode-page-64", _Form(page_size=64, is_split=True), 4),
        _decode("decode-everything", everything, 3),
        _decode("decode-fp8", _Form(pages=byte, is_split=True), 2),
        _decode("decode-head-80", _Form(head_dim=80, is_split=True), 3),
        _decode("decode-head-256", _Form(head_dim=256, is_split=True), 3),
        _decode("decode-values-128-of-192", _Form(head_dim=192, value_dim=128, is_split=True), 2),
        _decode("decode-drafts", _Form(short_query=9), 2, WARPGROUP_PRODUCT),
        _prefill("prefill", _Form()),
        _prefill("prefill-everything", everything),
        _prefill("prefill-fp8", _Form(pages=byte)),
        _prefill("prefill-head-256", _Form(head_dim=256)),
        _prefill("prefill-values-128-of-192", _Form(head_dim=192, value_dim=128)),
        _merge(),
    ]


def _decode(name: str, form: _Form, programs: int, *required: str) -> Compilation:
    tile = decode_tile(form.short_query * GROUP, form.head_dim, form.query, form.pages)
    constants = {"M_TILES": 1, "SPLIT": form.is_split, "MIN_KEYS": MIN_SPLIT_KEYS}
    return _compilation(
        Compilation(
            name=name,
            kernel=decode_kernel,
            signature=form.signature,
            constants={**form.constants, **constants},
            limits=_limits(programs, tile["num_warps"]),
            divisible_by_16=TENSORS,
            required=(ASYNC_COPY, *required),
        ),
        tile,
    )


def _prefill(name: str, form: _Form) -> Compilation:
    tile = prefill_tile(GROUP, form.head_dim, form.query)
    spans = {"ENDS": form.has_everything, "SYMMETRIC": form.has_everything}
    return _compilation(
        Compilation(
            name=name,
            kernel=prefill_kernel,
            signature={**form.signature, "ends": "*i32", "first_row": "i32", "num_rows": "i32"},
            constants={**form.constants, **spans},
            limits=_limits(1, tile["num_warps"]),
            divisible_by_16=(*TENSORS, "ends"),
            required=(ASYNC_COPY, WARPGROUP_PRODUCT),
        ),
        tile,
    )


def _merge() -> Compilation:
    form = _Form()
    return _compilation(
        Compilation(
            name="merge",
            kernel=merge_splits_kernel,
            signature={
                "parts": "*fp32",
                "part_lse": "*fp32",
                **{key: form.signature[key] for key in ("out", "lse", "cu_q", "seq_lens")},
                "splits": "i32",
            },
            constants={
                "HEADS": GROUP * KV_HEADS,
                "MAX_QUERY": 1,
                "N": 64,
                "D": 128,
                "P": 128,
                "WINDOW": 0,
                "LSE": False,
                "MIN_KEYS": MIN_SPLIT_KEYS,
            },
            limits=_limits(8, 4),
            divisible_by_16=("parts", "part_lse", "out", "lse", "cu_q", "seq_lens"),
        ),
        merge_tile(33, KV_HEADS),
    )


def _limits(programs: int, num_warps: int) -> Limits:
    """No spills, and so little of everything that this many programs fit on a multiprocessor."""
    registers = SM_REGISTERS // (programs * num_warps * 32) // 8 * 8
    return Limits(min(registers, 255), SM_SHARED_BYTES // programs - PROGRAM_SHARED_BYTES)


def _compilation(compilation: Compilation, tile: dict[str, int]) -> Compilation:
    """With a tile as the launcher would pass it: constants of the kernel and launch options."""
    constants = {key: value for key, value in tile.items() if key.isupper()}
    return replace(
        compilation,
        constants={**compilation.constants, **constants},
        num_warps=tile["num_warps"],
        num_stages=tile.get("num_stages", 3),
    )
