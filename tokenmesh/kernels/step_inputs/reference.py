"""The specification of step_inputs: one row after the other; also what runs on a CPU."""

import torch

from tokenmesh.kernels.step_inputs.row_state import RowState
from tokenmesh.kernels.step_inputs.step_tensors import StepTensors


def step_inputs_reference(
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    state: RowState,
    page_size: int,
    out: StepTensors,
) -> None:
    for per_token in (out.token_ids, out.positions, out.lengths, out.slots):
        per_token.zero_()
    out.seq_lens.zero_()
    starts = query_starts.tolist()
    for index, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        tokens = slice(starts[index], starts[index + 1])
        first = int(state.num_computed[row])
        length = first + tokens.stop - tokens.start
        positions = torch.arange(first, length, device=rows.device)
        blocks = state.tables[row].long()[positions // page_size]
        out.token_ids[tokens] = state.token_ids[row].long()[positions]
        out.positions[tokens] = positions
        out.lengths[tokens] = (positions + 1).clamp(min=int(state.min_length[row]))
        out.slots[tokens] = blocks * page_size + positions % page_size
        out.seq_lens[index] = length
        columns = -(-length // page_size)
        out.tables[index, :columns] = state.tables[row, :columns]
