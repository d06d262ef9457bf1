"""DeviceCodes: a weight of codes in the layout that kernels on a GPU read."""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Final, Self

import torch

from tokenmesh.kernels.alignment import MULTIPLE
from tokenmesh.kernels.capability import e4m3_problem
from tokenmesh.kernels.codes import Codes

CHUNK: Final = 64
"""Inputs whose codes of 4 bits are 32 bytes: byte i has input i in its low half, i + 32 above."""
ROUNDED_GROUP: Final = 128
"""Inputs of a token that are rounded to 8 bits with one scale."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCodes:
    """Weight [O, I] and bias of one layer; made by `DeviceCodes.pack`. G groups of inputs."""

    numbers: torch.Tensor
    """4 bits: uint8 [O, padded I / 2], see CHUNK; else int8 or float8_e4m3fn [O, I], the latter as
    uint8 for a GPU that has no instruction for it."""
    scales: torch.Tensor
    """[G, O]: bfloat16 or float16 where all of them are such numbers, else float32."""
    offsets: torch.Tensor | None
    """The same."""
    table: torch.Tensor | None
    """float32 [16]: what a code of 4 bits stands for; None: its number plus `shift`."""
    shift: float
    is_narrow: bool
    """A code has 4 bits."""
    inputs: int
    group_size: int
    bias: torch.Tensor | None
    order: torch.Tensor | None
    """int64 [I] as in Codes."""
    rounds_inputs: bool = False
    """As in Codes."""

    @staticmethod
    def problem(codes: Codes) -> str | None:
        """Why no kernel computes with codes on a GPU; None: one does."""
        outputs, inputs = codes.shape
        if outputs % MULTIPLE or inputs % MULTIPLE:
            return f"{outputs} outputs or {inputs} inputs are not multiples of {MULTIPLE}"
        if codes.group_size < inputs and codes.group_size % MULTIPLE:
            return f"groups of {codes.group_size} inputs are not multiples of {MULTIPLE}"
        return None

    @classmethod
    def pack(cls, codes: Codes, bias: torch.Tensor | None) -> Self:
        """Copy codes without a `problem`, on their device."""
        table, shift = None, 0.0
        is_narrow = codes.bits == 4
        if codes.kind == "e4m3":
            numbers = codes.numbers.contiguous()
            if not lacks_e4m3(numbers.device):
                numbers = numbers.view(torch.float8_e4m3fn)
        elif is_narrow:
            numbers, shift = _halves(codes.numbers), float(-codes.center)
        else:
            # int8, which has no number above 127
            numbers = (codes.numbers ^ 128).view(torch.int8).contiguous()
            shift = 128.0 - codes.center
        if codes.kind == "table":
            assert codes.table is not None
            values = torch.tensor(codes.table, device=numbers.device, dtype=torch.float32)
            table = values - codes.center
        return cls(
            numbers=numbers,
            scales=narrowed(codes.scales.t().contiguous()),
            offsets=None if codes.offsets is None else narrowed(codes.offsets.t().contiguous()),
            table=table,
            shift=shift,
            is_narrow=is_narrow,
            inputs=codes.shape[1],
            group_size=codes.group_size,
            bias=bias,
            order=codes.order,
            rounds_inputs=codes.rounds_inputs,
        )

    def multiplies_codes(self, dtype: torch.dtype) -> bool:
        """Return whether x of this type is rounded to the type of the codes."""
        if not self.rounds_inputs or self.numbers.dtype == torch.uint8:
            return False
        is_plain = self.offsets is None and self.shift == 0
        is_whole = self.group_size >= self.inputs or self.group_size % ROUNDED_GROUP == 0
        return is_plain and is_whole and dtype != torch.float32

    def decoded(self) -> torch.Tensor:
        """float32 [O, I]: the weight, with its inputs in `order`."""
        scales = self.scales.float()
        if self.is_narrow:
            low, high = self.numbers & 15, self.numbers >> 4
            chunks = [half.view(len(half), -1, CHUNK // 2) for half in (low, high)]
            codes = torch.cat(chunks, dim=-1).flatten(1)[:, : self.inputs]
            values = codes.float() if self.table is None else self.table[codes.long()]
        elif self.numbers.dtype == torch.uint8:
            values = self.numbers.view(torch.float8_e4m3fn).float()
        else:
            values = self.numbers.float()
        group = torch.arange(self.inputs, device=values.device) // self.group_size
        values = (values + self.shift if self.table is None else values) * scales.t()[:, group]
        return values if self.offsets is None else values + self.offsets.t()[:, group]


@cache
def lacks_e4m3(device: torch.device) -> bool:
    """Logs once why a GPU lacks it."""
    problem = e4m3_problem(device)
    if problem is not None:
        what = "%s: weights of it are decoded by integer instructions, activations are not rounded"
        logger.warning(what, problem)
    return problem is not None


def narrowed(factors: torch.Tensor) -> torch.Tensor:
    """The same numbers in the narrowest type that holds all of them."""
    for dtype in (torch.bfloat16, torch.float16):
        found = factors.to(dtype)
        if bool((found.float() == factors).all()):
            return found
    return factors


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [O, I] below 16 -> [O, padded I / 2], see CHUNK."""
    missing = -numbers.shape[1] % CHUNK
    padded = torch.nn.functional.pad(numbers, (0, missing))
    chunks = padded.view(len(padded), -1, CHUNK)
    low, high = chunks.chunk(2, dim=-1)
    return (low | high << 4).flatten(1)
