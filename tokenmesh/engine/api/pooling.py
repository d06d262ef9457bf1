"""Pooling: what is computed of a prompt in place of tokens."""

from typing import Literal

import msgspec

from tokenmesh.shared.ids import BlobKey

PoolTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The task, and what may differ from the model's own head."""

    task: PoolTask
    use_activation: bool | None = None
    """Normalize embeddings, apply softmax or sigmoid to scores; None: as the model says."""
    dimensions: int | None = None
    """Keep the first dimensions of an embedding, before it is normalized; None: all."""


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The numbers of one prompt: [size], or [tokens, size] of the tasks that answer per token.

    Fields are positional: append only.
    """

    shape: list[int]
    data: bytes = b""
    """float32, little-endian, row by row; empty where they are in a blob."""
    blob: BlobKey = BlobKey("")
    """Key of a blob with the same bytes: answers above 64 KiB."""
    blob_check: str = ""
    """`blobs.check_of` those bytes."""
