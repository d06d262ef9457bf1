"""post_update: after a step, count what is computed and append what was sampled.

rows          int32 [B]       row of the state for each row of the batch; negative: padding
query_starts  int32 [B + 1]   row b had query_starts[b + 1] - query_starts[b] tokens
draws         int32 [B]       which entry of `sampled` the row drew; negative: it drew nothing
sampled       int64 [N]
state         RowState        num_computed and token_ids change

A row draws when all its tokens are computed: the new token's index is num_computed. One past the
end of the row's room is dropped, since such a row has no next step.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.post_update.reference import post_update_reference
from tokenmesh.kernels.step_inputs.row_state import RowState

__all__ = ["post_update", "post_update_reference"]


def post_update(
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    draws: torch.Tensor,
    sampled: torch.Tensor,
    state: RowState,
) -> None:
    """Bring the state to where the next step's step_inputs wants it."""
    if uses_triton(rows):
        from tokenmesh.kernels.post_update import triton

        triton.post_update(rows, query_starts, draws, sampled, state)
    else:
        post_update_reference(rows, query_starts, draws, sampled, state)
