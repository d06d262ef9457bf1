"""Pooling: prompts that are answered with numbers, not with tokens.

A Pool is one request with one answer, without a stream: where the answer does not come, the gateway
places the same prompts again.
"""

import msgspec

from tokenmesh.engine.api.pooling import Pooled, PoolingParams, PoolTask
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.media import MediaItem

__all__ = ["Pool", "PoolAnswer", "PoolItem", "PoolTask", "Pooled", "PoolingParams"]


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


class PoolAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The numbers of a Pool's items, in their order."""

    pooled: list[Pooled]
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, over all items."""
