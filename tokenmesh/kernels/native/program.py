"""Program: a model's layers as a list of operations that one call into C runs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.kernels.native.start import library
from tokenmesh.kernels.native.structs import MAX_QUERIES, Model, Op, StepArguments


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """What changes from step to step. T tokens, R rows; all contiguous."""

    turns: Sequence[torch.Tensor]
    """For each rope: [T, 1, pairs] complex64."""
    slots: torch.Tensor
    """[T, 2 * kv_heads] int64, as `kernels.kv_write` takes them."""
    tables: torch.Tensor
    """[R, max_blocks] int64 block ids."""
    token_rows: torch.Tensor
    """[T] int64 the row of each token; a row's tokens follow each other."""
    positions: torch.Tensor
    """[T] int64"""
    query_scale: torch.Tensor | None
    """[T] float32 for models that have SCALE operations."""


class Program:
    """Operations over numbered buffers, each [T, width]; buffer 0 is `hidden`.

    Not thread-safe: the buffers are the program's own.
    """

    def __init__(
        self,
        model: Model,
        ops: Sequence[Op],
        widths: Sequence[int],
        weights: Sequence[torch.Tensor],
    ) -> None:
        """weights are those that the operations point to: the program keeps them alive."""
        self._model = model
        self._ops = (Op * len(ops))(*ops)
        self._widths = (ctypes.c_int64 * len(widths))(*widths)
        self._weights = weights
        self._buffers: list[torch.Tensor] = []
        self._capacity = 0
        self._tokens_of_tile = max(1, MAX_QUERIES // (model.heads // model.kv_heads))

    def run(self, hidden: torch.Tensor, inputs: ProgramInputs, pool: torch.Tensor) -> None:
        """Run over hidden [T, hidden], in place; writes keys and values into the pool.

        pool is [layers, 2, blocks, kv_heads, page_size, head_dim] in hidden's dtype.
        """
        kernels = library()
        num_tokens = hidden.shape[0]
        self._make_room(num_tokens, hidden.dtype)
        tiles = self._tiles(inputs.token_rows)
        buffers = _pointers([hidden, *self._buffers])
        turns = _pointers(inputs.turns)
        pairs = (ctypes.c_int64 * len(turns))(*(turn.shape[-1] for turn in inputs.turns))
        scale = inputs.query_scale
        step = StepArguments(
            tokens=num_tokens,
            buffers=ctypes.addressof(buffers),
            widths=ctypes.addressof(self._widths),
            turns=ctypes.addressof(turns),
            pairs=ctypes.addressof(pairs),
            pages=pool.data_ptr(),
            blocks=pool.shape[2],
            page_size=pool.shape[4],
            slots=inputs.slots.data_ptr(),
            tables=inputs.tables.data_ptr(),
            columns=inputs.tables.stride(0),
            rows=inputs.token_rows.data_ptr(),
            positions=inputs.positions.data_ptr(),
            scales=None if scale is None else scale.data_ptr(),
            tiles=tiles.data_ptr(),
            tile_count=len(tiles) - 1,
        )
        count = ctypes.c_int64(len(self._ops))
        kernels.tm_run(ctypes.byref(self._model), self._ops, count, ctypes.byref(step))

    def _make_room(self, num_tokens: int, dtype: torch.dtype) -> None:
        """Grow the buffers to the largest step so far; steps have a limit, so they do."""
        if num_tokens > self._capacity:
            widths = self._widths[1:]
            self._buffers = [torch.empty((num_tokens, width), dtype=dtype) for width in widths]
            self._capacity = num_tokens

    def _tiles(self, token_rows: torch.Tensor) -> torch.Tensor:
        """[tiles + 1] int64: the tokens that attention takes together share a row."""
        size, num_tokens = self._tokens_of_tile, len(token_rows)
        if size == 1:
            return torch.arange(num_tokens + 1)
        _, counts = torch.unique_consecutive(token_rows, return_counts=True)
        if len(counts) == num_tokens:
            return torch.arange(num_tokens + 1)
        tiles: list[int] = []
        first = 0
        for count in counts.tolist():
            tiles += range(first, first + count, size)
            first += count
        return torch.tensor([*tiles, num_tokens])


def _pointers(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
