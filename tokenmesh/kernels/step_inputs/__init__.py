"""step_inputs: from the rows' state and a short plan to all that the model reads in a step.

rows          int32 [B]       row of the state for each row of the batch; negative: padding
query_starts  int32 [B + 1]   row b's tokens are query_starts[b] to query_starts[b + 1]
state         RowState        a row's tokens start at its num_computed
out           StepTensors     overwritten; T may exceed query_starts[B]

Tokens of padding and tokens from query_starts[B] on become token 0 at position 0 in slot 0, which
belongs to the null block. A token just sampled is read from the state, where post_update put it.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.step_inputs.reference import step_inputs_reference
from tokenmesh.kernels.step_inputs.row_state import RowState
from tokenmesh.kernels.step_inputs.step_tensors import StepTensors

__all__ = ["RowState", "StepTensors", "step_inputs", "step_inputs_reference"]


def step_inputs(
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    state: RowState,
    page_size: int,
    out: StepTensors,
) -> None:
    """Fill `out` for one step."""
    if uses_triton(rows):
        from tokenmesh.kernels.step_inputs import triton

        triton.step_inputs(rows, query_starts, state, page_size, out)
    else:
        step_inputs_reference(rows, query_starts, state, page_size, out)
