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


def states_of(new: NewRow, length: int, hidden_size: int) -> tuple[torch.Tensor | None, str | None]:
    """The encoder's states [length, hidden] that a prompt attends to, and what is wrong with them.

    Its item lies at the prompt's first token, which makes the whole prefix depend on its hash.
    """
    if len(new.media) != 1:
        return None, f"the prompt has {len(new.media)} recordings, not one"
    item = new.media[0]
    blob = new.embeddings.get(item.content_hash)
    if blob is not None and item.offset:
        return None, f"the recording lies at token {item.offset}, not at the first one"
    return _values_of(item, blob, (length, hidden_size))


def patches_of(new: NewRow, hidden_size: int) -> tuple[list[MediaPatch], str | None]:
    """The patches of a request, and what is wrong with its media, if anything."""
    patches = []
    for item in new.media:
        blob = new.embeddings.get(item.content_hash)
        values, problem = _values_of(item, blob, (item.length, hidden_size))
        if values is None:
            return [], problem
        patches.append(MediaPatch(start=item.offset, embeddings=values))
    return patches, None


def _values_of(
    item: MediaItem, blob: TensorBlob | None, shape: tuple[int, int]
) -> tuple[torch.Tensor | None, str | None]:
    """What an encoder has computed for an item, or what is wrong with it."""
    problem = _problem(item, blob, shape)
    if blob is None or problem is not None:
        return None, problem
    dtype = getattr(torch, blob.dtype)
    values = torch.frombuffer(bytearray(blob.data), dtype=dtype).view(blob.shape)
    if not bool(values.isfinite().all()):
        return None, f"the embeddings of {item.kind} {item.content_hash[:12]} are not finite"
    return values, None


def _problem(item: MediaItem, blob: TensorBlob | None, shape: tuple[int, int]) -> str | None:
    name = f"the embeddings of {item.kind} {item.content_hash[:12]}"
    if blob is None:
        return f"{name} are missing"
    if blob.dtype not in ("float32", "bfloat16", "float16"):
        return f"{name} have type {blob.dtype}"
    if tuple(blob.shape) != shape:
        return f"{name} have shape {list(blob.shape)}, not {list(shape)}"
    return None
