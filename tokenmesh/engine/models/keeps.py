"""Define what the layers of a model keep between steps, and what it takes of memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.kernels.page_codes import row_elements


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of each token, in blocks."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Positions a query sees, its own included; None: all before it."""

    @property
    def width(self) -> int:
        """Features of a head's slot. Values are as wide as keys where they lie: one op serves
        both."""
        return max(self.key_dim, self.value_dim)

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of one token in pages of a type."""
        return 2 * self.kv_heads * row_elements(self.width, dtype) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Latent:
    """The compressed keys and values of multi-head latent attention, in blocks."""

    rank: int
    rope_dim: int

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of one token in pages of a type."""
        return row_elements(self.width, dtype) * dtype.itemsize


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
"""It holds what one layer keeps: any of them, also several."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """It says which layers share a block table.

    Groups have the same number of layers and one memory.
    """

    windows: tuple[int | None, ...]
    """These are the windows of each group: None for the first, then one window for all others."""
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


def stage_groups(keeps: Sequence[LayerKeeps], windows: tuple[int | None, ...]) -> Grouping:
    """Group the layers of a stage into the window groups of the whole model, since all stages have
    the same tables."""
    num_windowed = len(windows) - 1
    if not num_windowed:
        return one_group(keeps)
    is_windowed = [isinstance(each, Pages) and each.window is not None for (each,) in keeps]
    size = max(len(keeps) - sum(is_windowed), -(-sum(is_windowed) // num_windowed))
    groups, slots, seen = [], [], {False: 0, True: 0}
    for each in is_windowed:
        number = seen[each]
        seen[each] += 1
        groups.append(1 + number // size if each else 0)
        slots.append(number % size)
    return Grouping(windows, tuple(groups), tuple(slots))


def token_bytes(keeps: Sequence[LayerKeeps], grouping: Grouping, dtype: torch.dtype) -> int:
    """Bytes that one block of a type holds of one token, in all layers of a group."""
    first_of: dict[int, LayerKeeps] = {}
    for layer, slot in zip(keeps, grouping.slot_of, strict=True):
        first_of.setdefault(slot, layer)
    return sum(
        each.num_bytes(dtype)
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
