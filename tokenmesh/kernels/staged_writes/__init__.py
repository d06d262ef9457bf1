"""staged_writes: apply what changed in the rows' state, all tables at once, from one packed copy.

flat          int32 [total]   overwritten where a write says so; see step_inputs.RowState
destinations  int64 [W]       where in `flat` each write begins; RowState.address gives it
starts        int32 [W + 1]   write w is values[starts[w]] to values[starts[w + 1]], maybe none
values        int32 [V]

Writes must not overlap: they are applied in no order. Other types of 4 bytes travel as their bits.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.staged_writes.reference import staged_writes_reference

__all__ = ["staged_writes", "staged_writes_reference"]


def staged_writes(
    flat: torch.Tensor, destinations: torch.Tensor, starts: torch.Tensor, values: torch.Tensor
) -> None:
    """Write every run of values to its place."""
    if uses_triton(flat):
        from tokenmesh.kernels.staged_writes import triton

        triton.staged_writes(flat, destinations, starts, values)
    else:
        staged_writes_reference(flat, destinations, starts, values)
