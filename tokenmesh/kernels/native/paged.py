"""Keys and values written into pages, and attention over them, for models without a program."""

from dataclasses import dataclass, field

import torch

from tokenmesh.kernels.native.program import Program, ProgramInputs
from tokenmesh.kernels.native.structs import (
    MAX_HEAD_DIM,
    MAX_QUERIES,
    PAGE_TYPES,
    Kind,
    Op,
    ProgramModel,
)
from tokenmesh.kernels.page_codes import head_width


def fits_pages(query: torch.Tensor, key: torch.Tensor, pages: torch.Tensor, value_dim: int) -> bool:
    """Return whether `PagedAttention` takes them: dtypes and head sizes."""
    dim = head_width(pages)
    return (
        query.shape[-1] == value_dim == dim
        and dim % 16 == 0
        and dim <= MAX_HEAD_DIM
        and query.shape[1] // key.shape[1] <= MAX_QUERIES
        and (pages.dtype == query.dtype or pages.dtype in PAGE_TYPES)
        and query.dtype in (torch.float32, torch.bfloat16)
    )


@dataclass(slots=True)
class PagedAttention:
    """One program of C kernels for all layers that attend alike."""

    programs: dict[tuple[float, ...], Program] = field(default_factory=dict)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: torch.Tensor,
        inputs: ProgramInputs,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]; see `fits_pages`."""
        heads = torch.cat([each[0].transpose(0, 1) for each in (query, key, value)], dim=1)
        shape = (heads.dtype == torch.bfloat16, query.shape[1], key.shape[1], heads.shape[2])
        kind = (*shape, window or 0, scale, softcap or 0.0)
        if kind not in self.programs:
            self.programs[kind] = _program(*kind)
        self.programs[kind].run(heads.flatten(1), inputs, pages[None])
        # the results have taken the queries' place
        return heads[None, :, : query.shape[1]]


def _program(
    is_bf16: bool,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    window: int,
    scale: float,
    softcap: float,
) -> Program:
    queries, keys_values = num_heads * dim, 2 * num_kv_heads * dim
    ops = [
        Op(kind=Kind.KV_WRITE, width=keys_values, offset=queries),
        Op(kind=Kind.ATTENTION, window=window, value=scale, softcap=softcap),
    ]
    model = ProgramModel(is_bf16, num_heads, num_kv_heads, dim)
    return Program(model, ops, [queries + keys_values], [])
