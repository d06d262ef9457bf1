"""Pooling: prompts that are answered with numbers, not with tokens.

A Pool is one request with one answer, without a stream: where the answer does not come, the gateway
places the same prompts again.
"""

from typing import Literal

import msgspec

from tokenmesh.shared.ids import BlobKey, GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.media import MediaItem

PoolTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The task, and what may differ from the model's own head."""

    task: PoolTask
    use_activation: bool | None = None
    """Normalize embeddings, apply softmax or sigmoid to scores; None: as the model says."""
    dimensions: int | None = None
    """Keep the first dimensions of an embedding, before it is normalized; None: all."""


class PoolItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt: a text, or a pair of texts for a model that scores pairs."""

    prompt_ids: bytes
    type_ids: bytes = b""
    """One byte for each token: which text of a pair it belongs to; empty: all 0."""
    media: list[MediaItem] = []


class Pool(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Compute the numbers of some prompts. Answered with PoolAnswer, Refused or Failed.

    It is cancelled like a stream, by (gateway, stream, attempt), and when its gateway is lost.
    """

    request_id: RequestId
    model: ModelName
    gateway: GatewayId
    stream: int
    """The gateway's number for it, among those of its streams."""
    epoch: int
    """Epoch of the worker that the scheduler chose."""
    attempt: int = 0
    items: list[PoolItem]
    params: PoolingParams
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None
    reservation: str = ""
    """The reservation of the placement: given back with the answer."""
    tenant: str = ""
    """Whose share of the worker it takes."""
    weight: float = 1.0
    """The tenant's share; its readers bound it."""
    tenant_priority: int = 0
    """The tenant's class, before `priority`; smaller is sooner."""
    keep_alive_s: float | None = None
    """As in Generate."""
    lora_hash: str = ""
    """The content that `lora` must have; empty: any."""


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


class PoolAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The numbers of a Pool's items, in their order."""

    pooled: list[Pooled]
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, over all items."""
