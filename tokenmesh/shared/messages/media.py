"""Media, always by reference into the blob store, and the messages to mm_encoder_svc."""

from typing import Final

import msgspec

from tokenmesh.shared.ids import BlobKey, ModelName, RequestId

IMAGE: Final = "image"
EMBEDS: Final = "embeds"

EMBEDDINGS_PREFIX: Final = "emb:"
"""Of the keys of blobs that encoders write."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image of a prompt after preprocessing, or embeddings that a client brings.

    The prompt holds `length` placeholder tokens from position `offset` on; the encoder's output
    has shape [length, hidden] and takes their place.
    """

    kind: str
    """IMAGE, or EMBEDS: part of a prompt that a client has given as embeddings."""
    content_hash: str
    """Hex digest of the original bytes plus preprocessing options: the identity for every cache."""
    offset: int
    length: int
    pixels: BlobKey
    """A tensor blob, the tower's input; of EMBEDS the embeddings themselves."""
    embeddings: BlobKey | None = None
    """A tensor blob [length, hidden]; set once the encoder has answered."""
    embeddings_check: str = ""
    """Of that blob's bytes (`blobs.check_of`); empty where the encoder has not seen them."""


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request the embeddings of a prompt's media."""

    request_id: RequestId
    model: ModelName
    items: list[MediaItem]


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The same items, in order, each with `embeddings` set."""

    items: list[MediaItem]
    cached: int = 0
    """How many of them were not computed for this request."""
