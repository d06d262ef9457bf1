"""The conversation with mm_encoder_svc: preprocessed pixels to embeddings, both by reference."""

import msgspec

from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages.media import MediaItem


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Ask for the embeddings of a prompt's media."""

    request_id: RequestId
    model: ModelName
    items: list[MediaItem]


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The same items, in order, each with `embeddings` set."""

    items: list[MediaItem]
    cached: int = 0
    """How many of them were not computed for this request."""
