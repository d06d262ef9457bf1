"""Rows and states of kernel cases: slots in no order, and NaN where nothing may be read."""

import torch

from tests.kernels.case import Inputs, normal
from tokenmesh.kernels.state_rows import StateRows


def slots_of(num_rows: int) -> list[int]:
    """A slot for each row: not in order, and one between them that is another row's."""
    return [(5 * row + 3) % num_slots(num_rows) for row in range(num_rows)]


def num_slots(num_rows: int) -> int:
    """Slots of `state_of`: not a multiple of 5, so that `slots_of` gives each once."""
    return num_rows + 2 + ((num_rows + 2) % 5 == 0)


def put_rows(
    inputs: Inputs, lengths: tuple[int, ...], starts: tuple[int, ...], device: torch.device
) -> None:
    """Put the tensors of StateRows into the inputs of a case."""
    rows = StateRows.of(slots_of(len(lengths)), list(starts), list(lengths), device)
    inputs.update(slots=rows.slots, cu_q=rows.cu_q, starts=rows.starts)


def rows_in(inputs: Inputs, lengths: tuple[int, ...]) -> StateRows:
    """The StateRows of the inputs of a case."""
    longest = max(lengths, default=0)
    return StateRows(inputs["slots"], inputs["cu_q"], inputs["starts"], longest)


def state_of(
    starts: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    """A state [slots, *shape]; NaN in the slots of rows that start."""
    state = normal((num_slots(len(starts)), *shape), dtype, device, generator)
    for slot, start in zip(slots_of(len(starts)), starts, strict=True):
        if start == 0:
            state[slot] = float("nan")
    return state
