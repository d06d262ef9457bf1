"""What the layers of a model keep between steps, and the tensors that hold it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tokenmesh.kernels import huge_pages


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of each token, in blocks."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Positions a query sees, its own included; None: all before it."""

    @property
    def elements(self) -> int:
        """Of one token. Values are as wide as keys where they lie: one op serves both."""
        return 2 * self.kv_heads * self.width

    @property
    def width(self) -> int:
        """Features of a head's slot."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class Latent:
    """The compressed keys and values of multi-head latent attention, in blocks."""

    rank: int
    rope_dim: int

    @property
    def elements(self) -> int:
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class State:
    """One tensor of a fixed size for each row, such as the state of a recurrence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Cross:
    """Keys and values of an encoder's output, for each row; written when the row begins."""

    heads: int
    head_dim: int
    length: int
    """States of the encoder."""

    @property
    def elements(self) -> int:
        return 2 * self.heads * self.length * self.head_dim


Kept = Pages | Latent | State | Cross
LayerKeeps = tuple[Kept, ...]
"""What one layer keeps: any of them, also several."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which layers share a block table. Groups have the same number of layers and one memory."""

    windows: tuple[int | None, ...]
    """Of each group: None for the first, then one window for all others."""
    group_of: tuple[int, ...]
    """By layer."""
    slot_of: tuple[int, ...]
    """By layer: its number within its group, and of its tensors in memory."""


def one_group(keeps: Sequence[LayerKeeps]) -> Grouping:
    """A table for all layers; those with a window keep what is behind it as well."""
    return Grouping((None,), (0,) * len(keeps), tuple(range(len(keeps))))


def window_groups(keeps: Sequence[LayerKeeps]) -> Grouping:
    """Separate tables for layers with a window, where layers of both kinds have equal pages.

    The layers that see everything are one group; the others are cut into groups of as many.
    """
    plain = [layer[0] for layer in keeps if len(layer) == 1 and isinstance(layer[0], Pages)]
    windows = {each.window for each in plain}
    shapes = {(each.kv_heads, each.width) for each in plain}
    if len(plain) < len(keeps) or len(shapes) > 1 or len(windows) != 2 or None not in windows:
        return one_group(keeps)
    size = sum(each.window is None for each in plain)
    window = max(each for each in windows if each is not None)
    groups, slots, seen = [], [], {False: 0, True: 0}
    for each in plain:
        is_windowed = each.window is not None
        number = seen[is_windowed]
        seen[is_windowed] += 1
        groups.append(1 + number // size if is_windowed else 0)
        slots.append(number % size)
    return Grouping((None, *[window] * max(groups)), tuple(groups), tuple(slots))


def block_elements(keeps: Sequence[LayerKeeps], grouping: Grouping) -> int:
    """Elements that one block holds of one token, in all layers of a group."""
    first_of: dict[int, LayerKeeps] = {}
    for layer, slot in zip(keeps, grouping.slot_of, strict=True):
        first_of.setdefault(slot, layer)
    return sum(
        each.elements
        for layer in first_of.values()
        for each in layer
        if isinstance(each, Pages | Latent)
    )


def row_bytes(keeps: Sequence[LayerKeeps]) -> int:
    """Bytes that all layers keep of one row, whatever its length."""
    return sum(each.num_bytes for layer in keeps for each in layer if isinstance(each, State))


def cross_bytes(keeps: Sequence[LayerKeeps], dtype: torch.dtype) -> int:
    """Bytes that all layers keep of the encoder's output of one row."""
    elements = sum(each.elements for layer in keeps for each in layer if isinstance(each, Cross))
    return elements * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvStore:
    """Those tensors. Block 0 is the null block: padding is written there, and it stays finite."""

    keeps: Sequence[LayerKeeps]
    layers: Sequence[Sequence[torch.Tensor]]
    """For each layer and each thing that it keeps:

    Pages   [2, blocks, kv_heads, page_size, width]
    Latent  [blocks, page_size, rank + rope_dim]
    State   [rows + saved + 1, *shape], by row number, then those that were saved; the last is
            what padding writes to
    Cross   [rows, 2, heads, length, head_dim], by row number
    """
    pool: torch.Tensor | None
    """[slots, 2, blocks, kv_heads, page_size, width], of which `layers` are views, where every
    layer keeps pages of one shape and nothing else. With one group a slot is a layer."""
    num_blocks: int
    page_size: int
    grouping: Grouping
    num_saved: int = 0
    """Slots for saved states."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory, each byte once."""
        if self.pool is not None:
            return [self.pool]
        return list({id(t): t for layer in self.layers for t in layer}.values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def has_states(self) -> bool:
        """Whether rows keep something that a shared prefix does not bring."""
        return row_bytes(self.keeps) > 0

    @property
    def has_pages(self) -> bool:
        """Whether any layer keeps something in blocks."""
        return block_elements(self.keeps, self.grouping) > 0

    @property
    def scratch_row(self) -> int:
        """The slot of states that padding writes to."""
        return len(next(self._states())) - 1

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero blocks [n] in all layers."""
        if self.pool is not None:
            self.pool.index_fill_(2, blocks, 0)
            return
        for kept, tensor in self._each():
            if isinstance(kept, Pages):
                tensor.index_fill_(1, blocks, 0)
            elif isinstance(kept, Latent):
                tensor.index_fill_(0, blocks, 0)

    def clear_row(self, number: int) -> None:
        """Zero the states of a row."""
        for tensor in self._states():
            tensor[number].zero_()

    def save_state(self, number: int, slot: int) -> None:
        """Copy the states of a row to a slot for saved ones."""
        for tensor in self._states():
            tensor[slot - self.num_saved - 1].copy_(tensor[number])

    def load_state(self, number: int, slot: int) -> None:
        """Copy saved states to a row."""
        for tensor in self._states():
            tensor[number].copy_(tensor[slot - self.num_saved - 1])

    def _states(self) -> Iterator[torch.Tensor]:
        return (tensor for kept, tensor in self._each() if isinstance(kept, State))

    def _each(self) -> Iterator[tuple[Kept, torch.Tensor]]:
        for kept, tensors in zip(self.keeps, self.layers, strict=True):
            yield from zip(kept, tensors, strict=True)


def make_store(
    keeps: Sequence[LayerKeeps],
    num_blocks: int,
    page_size: int,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    grouping: Grouping | None = None,
    num_saved: int = 0,
) -> KvStore:
    """Pages, latents and cross pages are not initialized: on a CPU, those that no request ever used
    cost no memory. The states of rows are zero.

    num_saved: slots for saved states, which are not initialized either.
    """
    grouping = grouping or one_group(keeps)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        if device.type == "cpu":
            return huge_pages.empty(shape, of)
        return torch.empty(shape, dtype=of, device=device)

    def tensor_of(kept: Kept) -> torch.Tensor:
        if isinstance(kept, Pages):
            return empty(2, num_blocks, kept.kv_heads, page_size, kept.width)
        if isinstance(kept, Latent):
            return empty(num_blocks, page_size, kept.elements)
        if isinstance(kept, Cross):
            return empty(num_rows, 2, kept.heads, kept.length, kept.head_dim)
        states = empty(num_rows + num_saved + 1, *kept.shape, of=kept.dtype)
        states[:num_rows].zero_()
        states[-1:].zero_()
        return states

    shape = _common_shape(keeps)
    if shape is None:
        pool = None
        layers = [[tensor_of(kept) for kept in layer] for layer in keeps]
    else:
        kv_heads, width = shape
        num_slots = 1 + max(grouping.slot_of)
        pool = empty(num_slots, 2, num_blocks, kv_heads, page_size, width)
        slots = pool.unbind(0)
        layers = [[slots[slot]] for slot in grouping.slot_of]
    return KvStore(keeps, layers, pool, num_blocks, page_size, grouping, num_saved)


def _common_shape(keeps: Sequence[LayerKeeps]) -> tuple[int, int] | None:
    """(kv_heads, width) where all layers keep pages of one shape and nothing else."""
    shapes = {
        (kept.kv_heads, kept.width) if isinstance(kept, Pages) else None
        for layer in keeps
        for kept in layer
    }
    is_plain = len(shapes) == 1 and all(len(layer) == 1 for layer in keeps)
    return shapes.pop() if is_plain else None
