"""Program: a model's layers as a list of operations that one call into C runs."""

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.native.routed import Routed
from tokenmesh.kernels.native.start import library
from tokenmesh.kernels.native.structs import (
    MAX_QUERIES,
    PAGE_TYPES,
    Op,
    ProgramModel,
    StepArguments,
)

NO_TAPS: Final[Mapping[int, torch.Tensor]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RopeTurns:
    """The factors of one rope."""

    factors: torch.Tensor
    """[*, pairs] complex64, contiguous."""
    is_by_position: bool
    """Has a row for each position; else one for each token of the step."""


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """The inputs of one step. R rows in batch order, T tokens."""

    starts: Sequence[int]
    """[R] position of each row's first new token."""
    counts: Sequence[int]
    """[R] new tokens of each row; T in all."""
    numbers: Sequence[int]
    """[R] row of the tables that each one's blocks are in."""
    tables: Sequence[torch.Tensor]
    """Block tables of each KV group: [*, max_blocks] int64, contiguous."""
    turns: Sequence[RopeTurns]
    """The factors of each rope."""
    query_scale: torch.Tensor | None
    """[T] float32 for models that have SCALE operations."""
    adapters: int | None = None
    """Address of the `NativeRows` of adapters, for models that have LORA operations."""
    page_scales: torch.Tensor | None = None
    """float32 [layers, 2] of keys and values as 8-bit floats; None: 1."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Where a program stops for other ranks."""

    after: Sequence[int]
    """Numbers of operations after which a buffer is summed, ascending."""
    buffer: int
    add: Callable[[torch.Tensor], object]
    """Replaces [T, width] by the sum over all ranks."""


class Program:
    """Operations over numbered buffers, each [T, width]; buffer 0 is `hidden`.

    Not thread-safe: the buffers are the program's own.
    """

    def __init__(
        self,
        model: ProgramModel,
        ops: Sequence[Op],
        widths: Sequence[int],
        kept: Sequence[object],
        routed: Sequence[Routed] = (),
        sums: Sums | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        """kept: what operations point to, which the program keeps alive; routed experts too.

        sums: where a model is on several ranks; None: it is on one. layers: the number of the first
        operation of each.
        """
        self._sums = sums
        self._model = model
        self._ops = (Op * len(ops))(*ops)
        self._widths = (ctypes.c_int64 * len(widths))(*widths)
        self._kept = kept
        self._routed = routed
        self._layers = layers
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._buffers: list[torch.Tensor] = []
        self._addresses = (ctypes.c_void_p * len(widths))()
        self._capacity = 0
        self._tokens_of_tile = max(1, MAX_QUERIES // (model.heads // model.kv_heads))
        num_groups = 1 + max((op.group for op in ops), default=0)
        self._tables = (ctypes.c_void_p * num_groups)()

    def run(
        self,
        hidden: torch.Tensor,
        inputs: ProgramInputs,
        pool: torch.Tensor,
        taps: Mapping[int, torch.Tensor] = NO_TAPS,
    ) -> None:
        """Run over hidden [T, hidden], in place; writes keys and values into the pool. Between
        layers, hidden is copied to `taps`: each [T, hidden], before the layer of its number.

        pool is [slots, 2, blocks, kv_heads, page_size, elements of a row], see `page_codes`. Raises
        ValueError where there are tables of other KV groups than those of the operations.
        """
        num_tokens, ropes, scale = hidden.shape[0], inputs.turns, inputs.query_scale
        self._make_room(num_tokens, hidden.dtype)
        self._addresses[0] = hidden.data_ptr()
        numbers = self._expand(inputs)
        base = numbers.buffer_info()[0]
        self._take_tables(inputs.tables)
        turns = (ctypes.c_void_p * len(ropes))(*(each.factors.data_ptr() for each in ropes))
        by_position = (ctypes.c_int64 * len(ropes))(*(each.is_by_position for each in ropes))
        pairs = (ctypes.c_int64 * len(ropes))(*(each.factors.shape[-1] for each in ropes))
        step = StepArguments(
            tokens=num_tokens,
            buffers=ctypes.addressof(self._addresses),
            widths=ctypes.addressof(self._widths),
            turns=ctypes.addressof(turns),
            turns_by_position=ctypes.addressof(by_position),
            pairs=ctypes.addressof(pairs),
            pages=pool.data_ptr(),
            blocks=pool.shape[2],
            page_size=pool.shape[4],
            page_type=PAGE_TYPES.get(pool.dtype, 0),
            page_scales=None if inputs.page_scales is None else inputs.page_scales.data_ptr(),
            tables=ctypes.addressof(self._tables),
            columns=inputs.tables[0].stride(0),
            positions=base,
            rows=base + num_tokens * numbers.itemsize,
            scales=None if scale is None else scale.data_ptr(),
            tiles=base + 2 * num_tokens * numbers.itemsize,
            tile_count=len(numbers) - 2 * num_tokens - 1,
            scratch=self._scratch.data_ptr(),
            adapters=inputs.adapters,
        )
        if not taps and self._sums is None:
            count = ctypes.c_int64(len(self._ops))
            library().tm_run(ctypes.byref(self._model), self._ops, count, ctypes.byref(step))
            return
        stops = [(self._layers[each], target, hidden) for each, target in taps.items()]
        self._run_to_stops(step, stops, num_tokens)

    def _run_to_stops(
        self,
        step: StepArguments,
        copies: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
        num_tokens: int,
    ) -> None:
        """Run the operations up to each stop, and then those behind the last one. A stop is a sum
        or a copy: the number of the operation behind it, where to, what."""
        stops: list[tuple[int, Callable[[], object]]] = [
            (end, partial(target.copy_, source)) for end, target, source in copies
        ]
        if self._sums is not None:
            # buffer 0 is the caller's
            block = self._buffers[self._sums.buffer - 1][:num_tokens]
            stops += [(end, partial(self._sums.add, block)) for end in self._sums.after]
        first = 0
        for end, act in sorted(stops, key=lambda stop: stop[0]):
            self._run_some(first, end, step)
            act()
            first = end
        self._run_some(first, len(self._ops), step)

    def _run_some(self, first: int, end: int, step: StepArguments) -> None:
        ops = ctypes.byref(self._ops, first * ctypes.sizeof(Op))
        count = ctypes.c_int64(end - first)
        library().tm_run(ctypes.byref(self._model), ops, count, ctypes.byref(step))

    def _take_tables(self, tables: Sequence[torch.Tensor]) -> None:
        if len(tables) != len(self._tables):
            raise ValueError(
                f"tables of {len(tables)} KV groups for a program of {len(self._tables)}"
            )
        if len(tables) > 1 and len({each.shape for each in tables}) > 1:
            raise ValueError("the tables of all KV groups must have one shape")
        self._tables[:] = [each.data_ptr() for each in tables]

    def _make_room(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Grow the buffers to the largest step so far; steps have a limit, so they do."""
        if num_tokens > self._capacity:
            widths = self._widths[1:]
            self._buffers = []  # freed before larger ones are made
            self._buffers = [huge_pages.empty((num_tokens, width), dtype) for width in widths]
            self._addresses[1:] = [buffer.data_ptr() for buffer in self._buffers]
            scratch = max((each.scratch_bytes(num_tokens) for each in self._routed), default=0)
            self._scratch = torch.empty(scratch, dtype=torch.uint8)
            self._capacity = num_tokens

    def _expand(self, inputs: ProgramInputs) -> "array[int]":
        """Positions [T], table rows [T], first tokens of attention's tiles, and T at the end.

        A tile's tokens share a row. Python's lists: every call of torch costs more than a step of
        some streams has of them.
        """
        if len(inputs.counts) == sum(inputs.counts):
            tiles = range(len(inputs.counts) + 1)
            return array("q", [*inputs.starts, *inputs.numbers, *tiles])
        positions: list[int] = []
        rows: list[int] = []
        first_tokens: list[int] = []
        entries = zip(inputs.starts, inputs.counts, inputs.numbers, strict=True)
        for start, count, number in entries:
            first = len(positions)
            first_tokens += range(first, first + count, self._tokens_of_tile)
            positions += range(start, start + count)
            rows += [number] * count
        return array("q", [*positions, *rows, *first_tokens, len(positions)])
