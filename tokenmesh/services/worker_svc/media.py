"""Fetching a request's media embeddings before it may enter the engine's queue."""

import asyncio

from tokenmesh.services.worker_svc.admission import check_embeddings
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.errors import InvalidInput, NotFound, Unavailable
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob, decode


async def fetch_embeddings(
    media: list[MediaItem], blobs: Blobs, hidden_size: int, timeout_s: float
) -> dict[str, TensorBlob]:
    """The encoder's outputs by content hash; equal items are fetched once.

    Raises Unavailable, which is retryable, when one has expired or takes too long; InvalidInput
    when one is of the wrong shape.
    """
    item_by_hash = {item.content_hash: item for item in media}
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.gather(*(_fetch(item, blobs) for item in item_by_hash.values()))
    except TimeoutError as error:
        raise Unavailable(f"media embeddings did not arrive in {timeout_s:g} s") from error
    except NotFound as error:
        raise Unavailable(f"media embeddings have expired: {error.message}") from error
    embeddings = dict(zip(item_by_hash, found, strict=True))
    for item in media:
        check_embeddings(item, embeddings[item.content_hash], hidden_size)
    return embeddings


async def _fetch(item: MediaItem, blobs: Blobs) -> TensorBlob:
    if item.embeddings is None:
        raise InvalidInput("a media item has not been encoded", param="media")
    return decode(await blobs.get(item.embeddings))
