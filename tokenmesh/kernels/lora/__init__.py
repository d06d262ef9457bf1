"""lora: add what low-rank adapters change to the result of a linear layer, in place.

x     [tokens, in_features]     the layer's input: float32, bfloat16, on a GPU also float16
out   [tokens, out_features]    the layer's result, of x's dtype or float32
rows  which tokens have which adapter; the others stay as they are

On a CPU the matrices of an adapter are read where they are; a device has slots for them, stacked
by layer. A token's result does not depend on the tokens computed with it where the C kernel runs.
An adapter has its own rank in each part; the scaling is in its second matrix.
"""

from typing import Final

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.lora.bank import LoraBank, StepAdapters
from tokenmesh.kernels.lora.cpu import add_lora_on_cpu
from tokenmesh.kernels.lora.device import DeviceAdapterRows, DeviceBank, add_by_slot
from tokenmesh.kernels.lora.reference import lora_reference
from tokenmesh.kernels.lora.weights import (
    MAX_RANK,
    AdapterRows,
    HeadChange,
    LoraExperts,
    LoraPart,
    LoraWeights,
)

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

__all__ = [
    "MAX_RANK",
    "TOLERANCE",
    "AdapterRows",
    "DeviceAdapterRows",
    "DeviceBank",
    "HeadChange",
    "LoraBank",
    "LoraExperts",
    "LoraPart",
    "LoraWeights",
    "StepAdapters",
    "add_lora",
    "lora_reference",
]


def add_lora(x: torch.Tensor, out: torch.Tensor, bank: LoraBank | None) -> torch.Tensor:
    """Returns out [T, O], with what the adapters of the step at work add to the bank's layer."""
    rows = None if bank is None else bank.step.rows
    if bank is None or rows is None:
        return out
    if isinstance(rows, DeviceAdapterRows):
        _add_by_slot(x, out, rows.banks[bank.number], rows)
    elif rows.touches(bank.number):
        add_lora_on_cpu(x, out, bank.number, rows)
    return out


def _add_by_slot(
    x: torch.Tensor, out: torch.Tensor, bank: DeviceBank, rows: DeviceAdapterRows
) -> None:
    if uses_triton(x):
        from tokenmesh.kernels.lora import triton

        triton.add_by_slot(x, out, bank, rows)
    else:
        add_by_slot(x, out, bank, rows)
