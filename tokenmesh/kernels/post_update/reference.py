"""The specification of post_update: one row after the other; also what runs on a CPU."""

import torch

from tokenmesh.kernels.step_inputs.row_state import RowState


def post_update_reference(
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    draws: torch.Tensor,
    sampled: torch.Tensor,
    state: RowState,
) -> None:
    num_tokens = query_starts.diff().tolist()
    for row, count, draw in zip(rows.tolist(), num_tokens, draws.tolist(), strict=True):
        if row < 0:
            continue
        state.num_computed[row] += count
        end = int(state.num_computed[row])
        if draw >= 0 and end < state.token_ids.shape[1]:
            state.token_ids[row, end] = sampled[draw]
