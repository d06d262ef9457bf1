"""Images and videos in the prompts of a request for numbers."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.pooling.fields import PromptFields
from tokenmesh.services.gateway.pooling.job import PoolJob
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import PayloadTooLarge, ProtocolError
from tokenmesh.shared.messages import Encode
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.pooling import PoolItem
from tokenmesh.shared.telemetry import REQUEST_ID, span

Messages = list[dict[str, Any]]

_AT_ONCE: Final = 16
"""Media of one Encode, whose answer has a time limit."""


def check_number_of_media(chats: Sequence[Messages], settings: GatewaySettings) -> None:
    """Raises PayloadTooLarge before any of them is fetched."""
    contents = [message.get("content") for chat in chats for message in chat]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    num_media = sum(isinstance(part, dict) and part.get("type") != "text" for part in parts)
    if num_media > settings.max_pool_media:
        raise PayloadTooLarge(
            f"the request holds {num_media} images or videos, at most {settings.max_pool_media}"
        )


def media_options(body: PromptFields) -> bytes | None:
    """`ChatPrompt.mm_processor_kwargs_json` of a request."""
    options = body.mm_processor_kwargs
    return None if options is None else msgspec.json.encode(options)


async def with_embeddings(
    calls: ServiceCalls, job: PoolJob, items: list[PoolItem]
) -> list[PoolItem]:
    """The items with embeddings of their media. Raises what the calls of encoders raise."""
    media = [each for item in items for each in item.media]
    if not media:
        return items
    attributes: dict[str, str | int] = {
        REQUEST_ID: job.request_id,
        "tokenmesh.items": len(media),
    }
    encoded: list[MediaItem] = []
    with span("encode_media", attributes) as current:
        cached = 0
        for start in range(0, len(media), _AT_ONCE):
            part = media[start : start + _AT_ONCE]
            message = Encode(request_id=job.request_id, model=job.card.name, items=part)
            answer = await calls.encode(message, job.deadline_s)
            if len(answer.items) != len(part):
                raise ProtocolError(f"{len(answer.items)} embeddings for {len(part)} media")
            encoded += answer.items
            cached += answer.cached
        current.set_attribute("tokenmesh.cached", cached)
    found = iter(encoded)
    return [
        msgspec.structs.replace(item, media=[next(found) for _ in item.media]) for item in items
    ]
