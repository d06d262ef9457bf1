"""RowState: what a GPU keeps of each request between steps, so that no step sends it again."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from tokenmesh.kernels.alignment import padded


@dataclass(frozen=True, slots=True)
class RowState:
    """One row a request, for the request's life. R rows, L tokens, C blocks.

    All tables are views of `flat`, so that one launch of staged_writes reaches any of them.
    """

    flat: torch.Tensor
    """int32 [total]"""
    token_ids: torch.Tensor
    """int32 [R, L]: the prompt, then what was sampled."""
    tables: torch.Tensor
    """int32 [R, C]: block ids; 0, the null block, past a row's end."""
    num_computed: torch.Tensor
    """int32 [R]: tokens whose keys and values are in the pages."""
    min_length: torch.Tensor
    """int32 [R]: the least length that tokens of the row count with, see `StepTensors.lengths`."""

    @classmethod
    def zeros(
        cls,
        num_rows: int,
        max_tokens: int,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> Self:
        """Room for so many rows, with nothing in them; the rows of every table are aligned.

        num_groups: KV groups, each with its own tables; see `of_group`.
        """
        widths = [padded(max_tokens), padded(max_blocks)]
        sizes = [num_rows * width for width in widths] + [padded(num_rows)] * 2
        sizes.append((num_groups - 1) * sizes[1])
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        token_ids, tables, num_computed, min_length, _ = torch.split(flat, sizes)
        return cls(
            flat,
            token_ids.view(num_rows, -1)[:, :max_tokens],
            tables.view(num_rows, -1)[:, :max_blocks],
            num_computed[:num_rows],
            min_length[:num_rows],
        )

    def of_group(self, number: int) -> Self:
        """The same rows with the tables of a KV group; those of the first are `tables`."""
        if not number:
            return self
        num_rows, width = len(self.tables), self.tables.stride(0)
        behind = self.address(self.min_length, 0) + padded(num_rows)
        first = behind + (number - 1) * num_rows * width
        tables = self.flat[first : first + num_rows * width].view(num_rows, width)
        return replace(self, tables=tables[:, : self.tables.shape[1]])

    def address(self, table: torch.Tensor, row: int, column: int = 0) -> int:
        """Where in `flat` an entry of one of the tables is."""
        start = int(table.storage_offset() - self.flat.storage_offset())
        return start + row * table.stride(0) + column
