"""PartEmbeddings: embeddings of parts of speech, which the requests after one name again."""

from collections import OrderedDict

from tokenmesh.shared.ids import BlobKey
from tokenmesh.shared.tensor_blob import TensorBlob


class PartEmbeddings:
    """By their key in Redis, which stands for the content. The least recently used leave first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[BlobKey, TensorBlob] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: BlobKey) -> TensorBlob | None:
        """The embeddings, which become the most recently used."""
        blob = self._blobs.get(key)
        if blob is not None:
            self._blobs.move_to_end(key)
        return blob

    def add(self, key: BlobKey, blob: TensorBlob) -> None:
        """Keep embeddings, and forget others until all fit; too large ones are not kept."""
        old = self._blobs.pop(key, None)
        self.num_bytes -= 0 if old is None else len(old.data)
        if len(blob.data) > self._max_bytes:
            return
        self._blobs[key] = blob
        self.num_bytes += len(blob.data)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._blobs.popitem(last=False)
            self.num_bytes -= len(oldest.data)
