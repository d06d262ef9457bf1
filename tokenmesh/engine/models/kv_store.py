"""The tensors that hold what the layers of a model keep between steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from tokenmesh.engine.models.keeps import (
    Cross,
    Grouping,
    Kept,
    Latent,
    LayerKeeps,
    Pages,
    State,
    one_group,
    row_bytes,
)
from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.kv_blocks import copy_in, copy_out
from tokenmesh.kernels.page_codes import row_elements, stored

_HOST: Final = torch.device("cpu")


class KvScale(NamedTuple):
    """It holds what a layer's stored keys and values are multiplied by when they are read."""

    key: float = 1.0
    """It is the scale of latents too."""
    value: float = 1.0


NO_SCALE: Final = KvScale()


class LayerPages(NamedTuple):
    """It holds what a layer that attends reads and writes."""

    pages: torch.Tensor
    group: int
    """Its KV group, whose blocks the step names."""
    scale: KvScale


@dataclass(frozen=True, slots=True)
class KvStore:
    """The tensors. Block 0 is the null block: padding is written there, and it stays finite."""

    keeps: Sequence[LayerKeeps]
    layers: Sequence[Sequence[torch.Tensor]]
    """For each layer and each thing that it keeps:

    Pages   [2, blocks, kv_heads, page_size, elements of a row]
    Latent  [blocks, page_size, elements of a row]
    State   [rows + saved + 1, *shape], by row number, then those that were saved; the last is
            what padding writes to
    Cross   [rows, 2, heads, length, head_dim], by row number

    Rows of pages and latents have the model's type or 8 bits, see `page_codes`.
    """
    pool: torch.Tensor | None
    """[slots, 2, blocks, kv_heads, page_size, elements of a row], of which `layers` are views,
    where every layer keeps pages of one shape and nothing else. With one group a slot is a
    layer."""
    num_blocks: int
    page_size: int
    grouping: Grouping
    num_saved: int = 0
    """Slots for saved states."""
    scales: Sequence[KvScale] = ()
    """These are the scales of each layer's pages, where they are 8-bit floats with scales."""
    scale_table: torch.Tensor | None = None
    """The same as float32 [layers, 2] on the CPU."""
    home: torch.device = _HOST
    """It is the device of a model that keeps nothing, and has no tensors here."""

    def scale_of(self, layer: int) -> KvScale:
        """Return the scale of a layer's pages."""
        return self.scales[layer] if self.scales else NO_SCALE

    def pages_of(self, layer: int) -> LayerPages:
        """Return the pages of a layer that keeps pages and nothing else."""
        (pages,) = self.layers[layer]
        return LayerPages(pages, self.grouping.group_of[layer], self.scale_of(layer))

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
        return self.tensors[0].device if self.tensors else self.home

    @property
    def has_states(self) -> bool:
        """Return whether rows keep something that a shared prefix does not bring."""
        return row_bytes(self.keeps) > 0

    @property
    def has_pages(self) -> bool:
        """Return whether any layer keeps something in blocks."""
        return any(isinstance(each, Pages | Latent) for layer in self.keeps for each in layer)

    @property
    def scratch_row(self) -> int:
        """The slot of states that padding writes to."""
        return len(next(self._states())) - 1

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero blocks [n] in all layers."""
        if self.pool is not None:
            stored(self.pool).index_fill_(2, blocks, 0)
            return
        for kept, tensor in self._each():
            if isinstance(kept, Pages):
                stored(tensor).index_fill_(1, blocks, 0)
            elif isinstance(kept, Latent):
                stored(tensor).index_fill_(0, blocks, 0)

    @property
    def image_bytes(self) -> int:
        """Return the size of one block in all layers of a group: layer by layer keys, then values,
        heads outermost, or the latents."""
        return sum(len(each) * each.shape[2] for each in self._planes())

    def copy_out(self, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the images of blocks [n] to slots [n] of images [slots, image_bytes], uint8."""
        first = 0
        for plane in self._planes():
            copy_out(plane, blocks, images, slots, first)
            first += len(plane) * plane.shape[2]

    def copy_in(self, blocks: torch.Tensor, images: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the images in slots [n] to blocks [n]."""
        first = 0
        for plane in self._planes():
            copy_in(plane, blocks, images, slots, first)
            first += len(plane) * plane.shape[2]

    def copy_blocks(self, blocks: torch.Tensor, to: torch.Tensor) -> None:
        """Copy what blocks [n] keep to others."""
        for plane in self._planes():
            plane[:, to] = plane[:, blocks]

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

    def copies_of_rows(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Copies of the states of some rows."""
        return [tensor[list(numbers)] for tensor in self._states()]

    def restore_rows(
        self, numbers: Sequence[int], copies: Sequence[torch.Tensor], kept: Sequence[int]
    ) -> None:
        """Put back what `copies_of_rows` copied; `kept`: places among its numbers."""
        for tensor, copy in zip(self._states(), copies, strict=True):
            tensor[[numbers[place] for place in kept]] = copy[list(kept)]

    def _states(self) -> Iterator[torch.Tensor]:
        return (tensor for kept, tensor in self._each() if isinstance(kept, State))

    def _planes(self) -> Iterator[torch.Tensor]:
        """Yield what is kept in blocks as bytes [pieces, blocks, bytes of a piece], each byte
        once.
        """
        if self.pool is not None:
            yield self.pool.view(torch.uint8).view(
                -1, self.num_blocks, _piece_bytes(self.pool[0, 0])
            )
            return
        seen: set[int] = set()
        for kept, tensor in self._each():
            if isinstance(kept, Pages | Latent) and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                one = tensor[0] if isinstance(kept, Pages) else tensor
                yield tensor.view(torch.uint8).view(-1, self.num_blocks, _piece_bytes(one))

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
    page_dtype: torch.dtype | None = None,
    scales: Sequence[KvScale] = (),
) -> KvStore:
    """Pages, latents and cross pages are not initialized: on a CPU, those that no request ever used
    cost no memory but that of large pages. The states of rows are zero.

    num_saved: slots for saved states, which are not initialized either. page_dtype: of pages and
    latents; None: dtype. scales: one for each layer, or none.
    """
    grouping = grouping or one_group(keeps)
    pages = page_dtype or dtype

    def empty(*shape: int, of: torch.dtype = dtype, parts: int = 1) -> torch.Tensor:
        return _empty(shape, of, device, parts)

    def tensor_of(kept: Kept) -> torch.Tensor:
        if isinstance(kept, Pages):
            row = row_elements(kept.width, pages)
            return empty(2, num_blocks, kept.kv_heads, page_size, row, of=pages, parts=2)
        if isinstance(kept, Latent):
            return empty(num_blocks, page_size, row_elements(kept.width, pages), of=pages)
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
        slots = 1 + max(grouping.slot_of)
        row = row_elements(width, pages)
        pool = empty(slots, 2, num_blocks, kv_heads, page_size, row, of=pages, parts=2 * slots)
        layers = [[pool[slot]] for slot in grouping.slot_of]
    own = (grouping, num_saved, tuple(scales), _table(scales), device)
    return KvStore(keeps, layers, pool, num_blocks, page_size, *own)


def _piece_bytes(pages: torch.Tensor) -> int:
    """Bytes of one block in [blocks, ...]."""
    return pages[0].numel() * pages.element_size()


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, parts: int
) -> torch.Tensor:
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype, parts)
    return torch.empty(shape, dtype=dtype, device=device)


def _table(scales: Sequence[KvScale]) -> torch.Tensor | None:
    return torch.tensor(scales, dtype=torch.float32, device="cpu") if scales else None


def _common_shape(keeps: Sequence[LayerKeeps]) -> tuple[int, int] | None:
    """(kv_heads, width) where all layers keep pages of one shape and nothing else."""
    shapes = {
        (kept.kv_heads, kept.width) if isinstance(kept, Pages) else None
        for layer in keeps
        for kept in layer
    }
    is_plain = len(shapes) == 1 and all(len(layer) == 1 for layer in keeps)
    return shapes.pop() if is_plain else None
