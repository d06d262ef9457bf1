"""make_store: the memory for what the layers of a model keep."""

from collections.abc import Sequence

import torch

from tokenmesh.kernels import huge_pages
from tokenmesh.services.worker_svc.models.keeps import KvStore, Latent, LayerKeeps, Pages, State


def make_store(
    keeps: Sequence[LayerKeeps],
    num_blocks: int,
    page_size: int,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KvStore:
    """Pages and latents are not initialized: on a CPU, those that no request ever used cost no
    memory. States are zero."""

    def empty(*shape: int) -> torch.Tensor:
        if device.type == "cpu":
            return huge_pages.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def tensor_of(kept: Pages | Latent | State) -> torch.Tensor:
        if isinstance(kept, Pages):
            return empty(2, num_blocks, kept.kv_heads, page_size, kept.width)
        if isinstance(kept, Latent):
            return empty(num_blocks, page_size, kept.elements)
        return torch.zeros((num_rows + 1, *kept.shape), dtype=kept.dtype, device=device)

    shape = _common_shape(keeps)
    if shape is None:
        pool = None
        layers = [[tensor_of(kept) for kept in layer] for layer in keeps]
    else:
        kv_heads, width = shape
        pool = empty(len(keeps), 2, num_blocks, kv_heads, page_size, width)
        layers = [[pages] for pages in pool.unbind(0)]
    return KvStore(keeps, layers, pool, num_blocks, page_size)


def _common_shape(keeps: Sequence[LayerKeeps]) -> tuple[int, int] | None:
    """(kv_heads, width) where all layers keep pages of one shape and nothing else."""
    shapes = {
        (kept.kv_heads, kept.width) if isinstance(kept, Pages) else None
        for layer in keeps
        for kept in layer
    }
    is_plain = len(shapes) == 1 and all(len(layer) == 1 for layer in keeps)
    return shapes.pop() if is_plain else None
