"""Adds a client's embeddings to the hashes of blocks, next to what shared/hashing.py does."""

import hashlib
from collections.abc import Mapping, Sequence

from tokenmesh.shared.messages.blocks import ExtraKey
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob


def embeds_keys(
    media: Sequence[MediaItem], tensors: Mapping[str, TensorBlob], block_size: int
) -> dict[int, list[ExtraKey]]:
    """Return keys by the number of the block; `tensors` are by the content hash of an item.

    Each block has the hash of its own rows: tensors that begin alike share their first blocks.
    """
    keys: dict[int, list[ExtraKey]] = {}
    for item in media:
        if item.kind != EMBEDS:
            continue
        blob, start = tensors[item.content_hash], item.offset
        row, data = len(blob.data) // item.length, memoryview(blob.data)
        while start < item.end:
            block = start // block_size * block_size
            stop = min(item.end, block + block_size)
            rows = data[(start - item.offset) * row : (stop - item.offset) * row]
            value = f"{blob.dtype}:{hashlib.sha256(rows).hexdigest()}"
            key = ExtraKey(kind="prompt_embeds", value=value, offset=start - block)
            keys.setdefault(block, []).append(key)
            start = stop
    return keys
