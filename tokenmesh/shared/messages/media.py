"""Media as it travels: always by reference into the blob store, never inside a message."""

import msgspec

from tokenmesh.shared.ids import BlobKey


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image of a prompt after preprocessing.

    The prompt holds `length` placeholder tokens from position `offset` on; the encoder's output
    has shape [length, hidden] and takes their place.
    """

    kind: str
    """"image"."""
    content_hash: str
    """Hex digest of the original bytes plus preprocessing options: the identity for every cache."""
    offset: int
    length: int
    pixels: BlobKey
    """A tensor blob, the tower's input."""
    embeddings: BlobKey | None = None
    """A tensor blob [length, hidden]; set once the encoder has answered."""
