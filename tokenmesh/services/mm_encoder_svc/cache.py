"""EmbeddingCache: the embeddings used last, bounded by their bytes."""

from collections import OrderedDict


class EmbeddingCache:
    """Least recently used out first. An entry larger than the bound is not kept at all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._blobs)

    def get(self, key: str) -> bytes | None:
        """The blob, which now counts as used."""
        blob = self._blobs.get(key)
        if blob is not None:
            self._blobs.move_to_end(key)
        return blob

    def add(self, key: str, blob: bytes) -> None:
        """Keep a blob, and let go of others while all are over the bound."""
        old = self._blobs.pop(key, b"")
        self.num_bytes -= len(old)
        if len(blob) > self._max_bytes:
            return
        self._blobs[key] = blob
        self.num_bytes += len(blob)
        while self.num_bytes > self._max_bytes:
            _, evicted = self._blobs.popitem(last=False)
            self.num_bytes -= len(evicted)
