"""Cases of mla_attention: inputs, and kernels to compile ahead of time."""

import torch

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tests.kernels.cases.paged_attention import Case, scattered_tables
from tokenmesh.kernels.mla_attention.reference import TOLERANCE, mla_attention_reference
from tokenmesh.kernels.mla_attention.tile import latent_tile
from tokenmesh.kernels.mla_attention.triton_kernel import latent_kernel
from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS, DeviceRows
from tokenmesh.kernels.paged_attention.work import Rows

ROPE_DIM = 16
CASES = (
    Case("one-token", short=((0, 1),), head_dim=32),
    Case("splits", short=((299, 1), (0, 1), (128, 1), (-1, 1), (31, 1)), head_dim=32, splits=3,
         heads=20),
    Case("drafts", short=((260, 3), (0, 4), (62, 2), (5, 0)), head_dim=16, splits=2, heads=3),
    Case("prompts", long=((0, 33), (0, 1), (100, 40), (-5, 5)), head_dim=32, heads=5),
    Case("many-heads", short=((70, 1),), long=((20, 9),), head_dim=32, heads=100, page_size=64),
    Case("fp8", short=((140, 1), (3, 1)), long=((20, 9),), head_dim=32, heads=5, splits=2,
         pages_dtype=torch.float8_e4m3fn, scales=(0.5, 0.5)),
    Case("fp8-e5m2", short=((40, 1),), long=((0, 9),), head_dim=16, heads=3,
         pages_dtype=torch.float8_e5m2, scales=(2.0, 2.0)),
)  # fmt: skip
SPARSE = (
    Case("sparse", short=((70, 1), (-1, 1), (3, 2)), long=((20, 9),), head_dim=32, heads=5),
    Case(
        "sparse-fp8",
        short=((70, 1),),
        long=((20, 9),),
        head_dim=32,
        heads=5,
        pages_dtype=torch.float8_e4m3fn,
        scales=(0.5, 0.5),
    ),
    Case("sparse-many-heads", short=((300, 1),), long=((0, 3),), head_dim=16, heads=70),
)
NUM_INDICES = 48


def cases() -> list[KernelCase]:
    """Every case; the head's width is the rank."""
    dense = [_case(case, is_sparse=False) for case in CASES]
    return dense + [_case(case, is_sparse=True) for case in SPARSE]


def _case(case: Case, is_sparse: bool) -> KernelCase:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        return _inputs(case, is_sparse, dtype, device, generator)

    return KernelCase(
        name=case.name,
        make=make,
        run=lambda inputs: _run(case, inputs),
        reference=lambda inputs: _reference(case, inputs),
        tolerance=TOLERANCE,
    )


def _run(case: Case, inputs: Inputs) -> Outputs:
    from tokenmesh.kernels.mla_attention.triton import mla_attention

    query = inputs["query"]
    rows = DeviceRows(
        cu_q=inputs["cu_q"],
        seq_lens=inputs["seq_lens"],
        block_tables=inputs["block_tables"],
        num_short=len(case.short),
        max_short_query=max((length for _, length in case.short), default=0),
        num_long_tokens=sum(length for _, length in case.long),
        num_splits=case.splits,
    )
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    indices = inputs["indices"]
    out = mla_attention(
        query, inputs["pages"], rows, case.head_dim, 0.2, indices, lse, case.scales[0]
    )
    return {"out": out, "lse": lse}


def _reference(case: Case, inputs: Inputs) -> Outputs:
    starts, lengths = zip(*case.rows, strict=True)
    rows = Rows(starts, lengths, inputs["block_tables"].long())
    out, lse = mla_attention_reference(
        *(inputs["query"], inputs["pages"], rows, case.head_dim, 0.2, inputs["indices"]),
        case.scales[0],
    )
    return {"out": out, "lse": lse}


def _inputs(
    case: Case,
    is_sparse: bool,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> Inputs:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def int32(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    lengths = [length for _, length in case.rows]
    width = case.head_dim + ROPE_DIM
    tables, columns, seen = scattered_tables(case, generator)
    numbers = randn(len(seen), case.page_size, width)
    pages = torch.where(seen.to(device).unsqueeze(-1), numbers, torch.nan)
    return {
        "query": randn(sum(lengths), case.heads + 2, width).to(dtype)[:, : case.heads],
        "pages": pages.to(case.pages_dtype or dtype),
        "cu_q": int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "seq_lens": int32([start + length if length else 0 for start, length in case.rows]),
        "block_tables": tables.to(device)[:, :columns],
        "indices": _indices(case).to(device) if is_sparse else None,
    }


def _indices(case: Case) -> torch.Tensor:
    """[T, NUM_INDICES] int32: every seventh position back from each token's own, -1 between."""
    positions = [p for start, n in case.rows for p in range(start, start + n)]
    steps = torch.arange(NUM_INDICES)
    places = torch.tensor(positions).unsqueeze(1) - 7 * (steps // 2)
    return torch.where((steps % 2 == 0) & (places >= 0), places, -1).to(torch.int32)


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
        _compilation("decode-16-heads-fp8", 16, is_split=True, pages="*fp8e4nv", max_spills=2),
        _compilation("prefill-128-heads-fp8", 128, max_query=0, pages="*fp8e4nv"),
    ]


def _compilation(
    name: str,
    heads: int,
    *,
    max_query: int = 1,
    is_split: bool = False,
    is_indexed: bool = False,
    pages: str = "*bf16",
    max_spills: int = 0,
) -> Compilation:
    tile = latent_tile(heads if max_query else 64, 512, torch.bfloat16)
    registers = 65_536 // (tile["num_warps"] * 32)
    return Compilation(
        name=name,
        kernel=latent_kernel,
        signature={
            "query": "*bf16",
            "pages": pages,
            "out": "*fp32" if is_split else "*bf16",
            "lse": "*fp32",
            **dict.fromkeys(TABLES, "*i32"),
            **dict.fromkeys(("scale", "page_scale"), "fp32"),
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
        limits=CompileLimits(min(registers, 255), 227 << 10, max_spills),
        divisible_by_16=("query", "pages", "out", "lse", *TABLES, *STRIDES),
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
        required=(ASYNC_COPY, PRODUCT),
    )
