"""Fetching a request's media embeddings before it may enter the engine's queue."""

import asyncio
import logging

from tokenmesh.services.worker_svc.admission import check_embeddings
from tokenmesh.shared.blobs import Blobs, check_of
from tokenmesh.shared.errors import (
    ConfigError,
    InvalidInput,
    NotFound,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.messages.media import EMBEDDINGS_PREFIX, IMAGE, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob, decode

logger = logging.getLogger(__name__)


async def fetch_embeddings(
    media: list[MediaItem], blobs: Blobs, hidden_size: int, timeout_s: float
) -> dict[str, TensorBlob]:
    """The encoder's outputs by content hash; equal items are fetched once.

    Raises Unavailable, which is retryable, when one has expired, takes too long, or is not what
    the encoder has put there, which is removed; InvalidInput when a client's own is of the wrong
    shape.
    """
    item_by_hash = {item.content_hash: item for item in media}
    try:
        async with asyncio.timeout(timeout_s):
            items = item_by_hash.values()
            found = await asyncio.gather(*(_fetch(item, blobs, hidden_size) for item in items))
    except TimeoutError as error:
        raise Unavailable(f"media embeddings did not arrive in {timeout_s:g} s") from error
    except NotFound as error:
        raise Unavailable(f"media embeddings have expired: {error.message}") from error
    embeddings = dict(zip(item_by_hash, found, strict=True))
    for item in media:
        check_embeddings(item, embeddings[item.content_hash], hidden_size)
    return embeddings


async def _fetch(item: MediaItem, blobs: Blobs, hidden_size: int) -> TensorBlob:
    if item.embeddings is None:
        raise InvalidInput("a media item has not been encoded", param="media")
    try:
        data = await blobs.get(item.embeddings)
        blob = decode(data)
        if item.kind != IMAGE:
            return blob
        check_embeddings(item, blob, hidden_size)
    except (NotFound, Unavailable, ConfigError):
        raise
    except TokenMeshError as error:
        if item.kind != IMAGE:
            raise
        reason = error.message
    else:
        if item.embeddings_check in ("", check_of(data)):
            return blob
        reason = "not what the encoder has put there"
    logger.warning("the embeddings %s are spoiled: %s", item.embeddings, reason)
    if item.embeddings.startswith(EMBEDDINGS_PREFIX):
        await blobs.remove(item.embeddings)
    raise Unavailable(f"media embeddings are spoiled: {reason}")
