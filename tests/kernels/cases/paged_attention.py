"""Cases of paged_attention: inputs, and kernels to compile ahead of time."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from tests.kernels.case import Compilation, CompileLimits, Inputs, KernelCase, Outputs
from tokenmesh.kernels.paged_attention.device import MIN_SPLIT_KEYS, DeviceRows
from tokenmesh.kernels.paged_attention.reference import TOLERANCE, attention_and_lse_reference
from tokenmesh.kernels.paged_attention.triton_decode import decode_kernel
from tokenmesh.kernels.paged_attention.triton_merge import merge_splits_kernel
from tokenmesh.kernels.paged_attention.triton_prefill import prefill_kernel
from tokenmesh.kernels.paged_attention.triton_tiles import decode_tile, merge_tile, prefill_tile
from tokenmesh.kernels.paged_attention.variant import Variant
from tokenmesh.kernels.paged_attention.work import Rows, span_ends

COLUMN_MULTIPLE = 16
SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Rows are (first position, tokens); a padded row has the first position -tokens."""

    name: str
    short: tuple[tuple[int, int], ...] = ()
    long: tuple[tuple[int, int], ...] = ()
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    splits: int = 1
    softcap: float | None = None
    has_sinks: bool = False
    pages_dtype: torch.dtype | None = None
    """None: the query's."""
    scales: tuple[float, float] = (1.0, 1.0)
    value_dim: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    has_symmetric_window: bool = False

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """All rows in batch order."""
        return self.short + self.long


CASES = (
    Case("one-token", short=((0, 1),)),
    Case("page-borders", short=((14, 1), (15, 1), (16, 1), (63, 1), (64, 1), (-1, 1), (79, 1))),
    Case("padding", short=((20, 1), (-1, 1), (3, 0), (40, 1), (-1, 1)), has_sinks=True),
    Case(
        "splits", short=((299, 1), (0, 1), (127, 1), (128, 1), (-1, 1)), heads=7, kv_heads=1,
        splits=3, has_sinks=True,
    ),
    Case(
        "drafts", short=((260, 3), (0, 4), (62, 2), (63, 1), (5, 0)), heads=6, head_dim=80,
        page_size=64, splits=2, softcap=3.0,
    ),
    Case(
        "window-below-a-page", short=((300, 1), (64, 3), (63, 2), (-2, 2), (4, 1)), head_dim=96,
        page_size=64, window=20, splits=2,
    ),
    Case("window-of-one", short=((70, 1), (16, 2)), long=((40, 33),), window=1),
    Case("splits-in-a-window", short=((600, 2), (30, 1)), window=300, splits=4, has_sinks=True),
    Case("many-heads", short=((50, 4), (7, 1)), heads=20, kv_heads=1, head_dim=16, page_size=8),
    Case(
        "fp8-decode", short=((100, 1), (15, 1)), heads=2, head_dim=256, has_sinks=True,
        pages_dtype=torch.float8_e4m3fn, scales=(0.5, 1.5),
    ),
    Case("prompts", long=((0, 2), (0, 33), (0, 1), (0, 129), (0, 64))),
    Case("prefixes", long=((100, 70), (16, 7), (63, 65)), heads=7, kv_heads=1, head_dim=80,
         page_size=64),
    Case("prompts-in-a-window", long=((0, 100), (70, 80)), window=70, softcap=5.0),
    Case("narrow-window", long=((150, 40), (0, 30)), heads=2, kv_heads=2, window=9, head_dim=96,
         has_sinks=True),
    Case("padded-prompts", long=((10, 20), (-5, 5), (0, 0), (30, 3)), heads=5, kv_heads=1),
    Case(
        "fp8-prefill", long=((64, 64), (0, 20)), page_size=128,
        pages_dtype=torch.float8_e4m3fn, scales=(2.0, 0.5),
    ),
    Case(
        "fp8-e5m2", short=((100, 1), (15, 2)), long=((20, 30),), heads=4, kv_heads=2, splits=2,
        pages_dtype=torch.float8_e5m2, scales=(0.5, 1.5), window=40,
    ),
    Case("narrow-values", short=((130, 1), (9, 2)), long=((20, 50),), head_dim=80, value_dim=32,
         splits=2),
    Case("wide-values", short=((40, 1),), long=((0, 40),), head_dim=16, value_dim=96, window=11),
    Case("images", short=((20, 1), (3, 1)), long=((0, 130), (30, 70)), spans=((4, 90), (140, 190)),
         has_sinks=True),
    Case("images-in-a-window", long=((0, 130), (40, 70)), spans=((3, 70), (131, 170)), window=30),
    Case("whole-rows", short=((0, 1),), long=((0, 33), (0, 100)), spans=((1, 34), (34, 134))),
    Case("whole-rows-in-a-window", long=((0, 33), (0, 150)), spans=((0, 33), (33, 183)), window=20,
         has_symmetric_window=True, softcap=9.0),
    Case(
        "mixed", short=((130, 1), (33, 2), (-1, 1)), long=((64, 50), (0, 17)), splits=2,
        has_sinks=True, softcap=20.0,
    ),
)  # fmt: skip


def cases() -> list[KernelCase]:
    """Every case."""
    return [case_of(case) for case in CASES]


def case_of(case: Case) -> KernelCase:
    """One case, as the kernel tests take it."""

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        return _inputs(case, dtype, device, generator)

    return KernelCase(
        name=case.name,
        make=make,
        run=lambda inputs: _run(case, inputs),
        reference=lambda inputs: _reference(case, inputs),
        tolerance=TOLERANCE,
    )


def _run(case: Case, inputs: Inputs) -> Outputs:
    from tokenmesh.kernels.paged_attention.triton import paged_attention

    query = inputs["query"]
    rows = DeviceRows(
        cu_q=inputs["cu_q"],
        seq_lens=inputs["seq_lens"],
        block_tables=inputs["block_tables"],
        num_short=len(case.short),
        max_short_query=max((length for _, length in case.short), default=0),
        num_long_tokens=sum(length for _, length in case.long),
        num_splits=case.splits,
        window=case.window,
        ends=inputs["ends"],
        has_symmetric_window=case.has_symmetric_window,
    )
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    scale = case.head_dim**-0.5
    out = paged_attention(query, inputs["pages"], rows, scale, _variant(case, inputs), lse)
    return {"out": out, "lse": lse}


def _reference(case: Case, inputs: Inputs) -> Outputs:
    rows = Rows(
        [start for start, _ in case.rows],
        [length for _, length in case.rows],
        inputs["block_tables"].long(),
        case.spans,
        case.has_symmetric_window,
    )
    query, pages, scale = inputs["query"], inputs["pages"], case.head_dim**-0.5
    variant = _variant(case, inputs)
    out, lse = attention_and_lse_reference(query, pages, rows, scale, case.window, variant)
    return {"out": out, "lse": lse}


def _variant(case: Case, inputs: Inputs) -> Variant:
    return Variant(case.softcap, inputs["sinks"], *case.scales, case.value_dim)


def _inputs(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def int32(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    lengths = [length for _, length in case.rows]
    tables, columns, seen = scattered_tables(case, generator)
    value_dim = case.value_dim or case.head_dim
    width = max(case.head_dim, value_dim)
    shape = (2, len(seen), case.kv_heads, case.page_size, width)
    pages = torch.where(seen.to(device).view(1, len(seen), 1, -1, 1), randn(*shape), torch.nan)
    pages[0, ..., case.head_dim :] = torch.nan
    pages[1, ..., value_dim:] = torch.nan
    starts = [start for start, _ in case.rows]
    ends = span_ends(Rows(starts, lengths, tables, case.spans)).tolist() if case.spans else None
    buffer = randn(sum(lengths), case.heads + 2 * case.kv_heads, case.head_dim).to(dtype)
    return {
        "query": buffer[:, : case.heads],
        "pages": pages.to(case.pages_dtype or dtype),
        "cu_q": int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "seq_lens": int32([start + length if length else 0 for start, length in case.rows]),
        "block_tables": tables.to(device)[:, :columns],  # a copy of a slice would lose its padding
        "ends": None if ends is None else int32(ends),
        "sinks": randn(case.heads).to(dtype) if case.has_sinks else None,
    }


def scattered_tables(
    case: Case, generator: torch.Generator
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Scattered block tables, on the host, the columns of them that are needed, and which cells
    [blocks, page_size] are seen."""
    size = case.page_size
    ends = [start + length for start, length in case.rows]
    firsts = [0 if case.window is None else max(0, s - case.window + 1) for s, _ in case.rows]
    columns = max(1, max(-(-end // size) for end in ends))
    stride = -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    tables = torch.zeros(len(ends), stride, dtype=torch.int32)
    counts = [
        max(0, -(-end // size) - first // size) for first, end in zip(firsts, ends, strict=True)
    ]
    num_blocks = 1 + sum(counts) + SPARE_BLOCKS
    order = torch.randperm(num_blocks - 1, device=generator.device, generator=generator)
    blocks = (order.cpu() + 1).to(torch.int32)
    seen = torch.zeros(num_blocks, size, dtype=torch.bool)
    taken = 0
    for row, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        if counts[row] == 0:
            continue
        own = blocks[taken : taken + counts[row]]
        taken += counts[row]
        tables[row, first // size : first // size + len(own)] = own
        positions = torch.arange(first, end)
        seen[tables[row, positions // size].long(), positions % size] = True
    return tables, columns, seen


SM_REGISTERS = 65_536
SM_SHARED_BYTES = 228 << 10
PROGRAM_SHARED_BYTES = 1 << 10
"""The hardware takes so much of each program's shared memory for itself."""
GROUP = 4
KV_HEADS = 8
ASYNC_COPY = r"LDGSTS|UTMALDG"
WARPGROUP_PRODUCT = r"HGMMA"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}
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
    half, byte, wide_byte = torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
    everything = _Form(half, half, page_size=64, has_everything=True)
    return [
        _decode("decode", _Form(is_split=True), 3),
        _decode("decode-page-64", _Form(page_size=64, is_split=True), 4),
        _decode("decode-everything", everything, 3),
        _decode("decode-fp8", _Form(pages=byte, is_split=True), 2),
        _decode("decode-fp8-e5m2", _Form(pages=wide_byte, is_split=True), 2),
        _decode("decode-head-80", _Form(head_dim=80, is_split=True), 3),
        _decode("decode-head-256", _Form(head_dim=256, is_split=True), 3),
        _decode("decode-values-128-of-192", _Form(head_dim=192, value_dim=128, is_split=True), 2),
        _decode("decode-drafts", _Form(short_query=9), 2, WARPGROUP_PRODUCT),
        _prefill("prefill", _Form()),
        _prefill("prefill-everything", everything),
        _prefill("prefill-fp8", _Form(pages=byte)),
        _prefill("prefill-fp8-e5m2", _Form(pages=wide_byte)),
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


def _limits(programs: int, num_warps: int) -> CompileLimits:
    """No spills, and so little of everything that this many programs fit on a multiprocessor."""
    registers = SM_REGISTERS // (programs * num_warps * 32) // 8 * 8
    return CompileLimits(min(registers, 255), SM_SHARED_BYTES // programs - PROGRAM_SHARED_BYTES)


def _compilation(compilation: Compilation, tile: dict[str, int]) -> Compilation:
    """With a tile as the launcher would pass it: constants of the kernel and launch options."""
    constants = {key: value for key, value in tile.items() if key.isupper()}
    return replace(
        compilation,
        constants={**compilation.constants, **constants},
        num_warps=tile["num_warps"],
        num_stages=tile.get("num_stages", 3),
    )
