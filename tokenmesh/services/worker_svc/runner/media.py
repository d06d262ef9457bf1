"""Embeddings that take the place of placeholder tokens."""

from dataclasses import dataclass

import torch

from tokenmesh.services.worker_svc.engine.plan import NewRow
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob


@dataclass(frozen=True, slots=True)
class MediaPatch:
    """One item's embeddings and the prompt positions they fill."""

    start: int
    embeddings: torch.Tensor
    """[length, hidden]"""

    def overlap(self, start: int, end: int) -> tuple[slice, torch.Tensor] | None:
        """The part within positions [start, end): where in the chunk it goes, and the values."""
        first = max(start, self.start)
        last = min(end, self.start + len(self.embeddings))
        if first >= last:
            return None
        values = self.embeddings[first - self.start : last - self.start]
        return slice(first - start, last - start), values


def patches_of(new: NewRow, hidden_size: int) -> tuple[list[MediaPatch], str | None]:
    """The patches of a request, and what is wrong with its media, if anything."""
    patches = []
    for item in new.media:
        blob = new.embeddings.get(item.content_hash)
        problem = _problem(item, blob, hidden_size)
        if blob is None or problem is not None:
            return [], problem
        dtype = getattr(torch, blob.dtype)
        values = torch.frombuffer(bytearray(blob.data), dtype=dtype).view(blob.shape)
        if not bool(values.isfinite().all()):
            return [], f"the embeddings of image {item.content_hash[:12]} are not finite"
        patches.append(MediaPatch(start=item.offset, embeddings=values))
    return patches, None


def _problem(item: MediaItem, blob: TensorBlob | None, hidden_size: int) -> str | None:
    name = f"the embeddings of image {item.content_hash[:12]}"
    if blob is None:
        return f"{name} are missing"
    if blob.dtype not in ("float32", "bfloat16", "float16"):
        return f"{name} have type {blob.dtype}"
    if tuple(blob.shape) != (item.length, hidden_size):
        return f"{name} have shape {list(blob.shape)}, not {[item.length, hidden_size]}"
    return None
