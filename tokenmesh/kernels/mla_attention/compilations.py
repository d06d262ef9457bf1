"""What mla_attention compiles to for DeepSeek: rank 512, 64 turned numbers, 16 and 128 heads."""

import torch

from tokenmesh.kernels.mla_attention.tile import latent_tile
from tokenmesh.kernels.mla_attention.triton_kernel import latent_kernel
from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS
from tokenmesh.kernels.specimen import Compilation, Limits

ASYNC_COPY = r"LDGSTS|UTMALDG"
PRODUCT = r"HMMA"
NUMBERS = ("num_indices", "first_row", "num_rows")
STRIDES = ("token_stride", "head_stride", "table_stride", "index_stride")
TABLES = ("cu_q", "seq_lens", "tables", "ends", "indices")


def compilations() -> list[Compilation]:
    """Decode of few and of many heads, prompts, and sparse attention."""
    return [
        _compilation("decode-16-heads", 16, is_split=True),
        _compilation("decode-128-heads", 128, is_split=True),
        _compilation("prefill-16-heads", 16, max_query=0),
        _compilation("prefill-128-heads", 128, max_query=0),
        _compilation("sparse-128-heads", 128, is_indexed=True),
    ]


def _compilation(
    name: str,
    heads: int,
    *,
    max_query: int = 1,
    is_split: bool = False,
    is_indexed: bool = False,
) -> Compilation:
    tile = latent_tile(heads if max_query else 64, 512, torch.bfloat16)
    registers = 65_536 // (tile["num_warps"] * 32)
    return Compilation(
        name=name,
        kernel=latent_kernel,
        signature={
            "query": "*bf16",
            "pages": "*bf16",
            "out": "*fp32" if is_split else "*bf16",
            "lse": "*fp32",
            **dict.fromkeys(TABLES, "*i32"),
            "scale": "fp32",
            **dict.fromkeys((*STRIDES, *NUMBERS), "i32"),
        },
        constants={
            "HEADS": heads,
            "M": tile["M"],
            "TOKENS": 1 if max_query else max(1, tile["M"] // heads),
            "N": tile["N"],
            "R": 512,
            "E": 64,
            "PAGE": 16,
            "MAX_QUERY": max_query,
            "INDEXED": is_indexed,
            "ENDS": max_query == 0,
            "LSE": not is_split,
            "SPLIT": is_split,
            "MIN_KEYS": MIN_SPLIT_KEYS,
        },
        limits=Limits(min(registers, 255), 227 << 10),
        divisible_by_16=("query", "pages", "out", "lse", *TABLES, *STRIDES),
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
        required=(ASYNC_COPY, PRODUCT),
    )
