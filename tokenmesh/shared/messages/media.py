"""Media, always by reference into the blob store, and the messages to mm_encoder_svc."""

import msgspec

from tokenmesh.engine.api.media import (
    ADD,
    AUDIO,
    EMBEDDINGS_PREFIX,
    EMBEDS,
    EMBEDS_PART,
    IMAGE,
    REPLACE,
    VIDEO,
    MediaItem,
    count_by_modality,
)
from tokenmesh.shared.ids import ModelName, RequestId

__all__ = [
    "ADD",
    "AUDIO",
    "EMBEDDINGS_PREFIX",
    "EMBEDS",
    "EMBEDS_PART",
    "IMAGE",
    "REPLACE",
    "VIDEO",
    "Encode",
    "Encoded",
    "MediaItem",
    "count_by_modality",
]


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request the embeddings of a prompt's media."""

    request_id: RequestId
    model: ModelName
    items: list[MediaItem]
    num_known: int = 0
    """The first so many items have their embeddings, and are returned as they are."""


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The same items, in order, each with `embeddings` set."""

    items: list[MediaItem]
    cached: int = 0
    """The number of items that were not computed for this request."""
