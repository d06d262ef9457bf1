"""Media of a chat request: large data URIs go into the blob store before the message is sent, and
a file is used by its tenant only."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenmesh.services.gateway.core.files.uploads import ID_PREFIX, Uploads
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.base64_text import decode_base64
from tokenmesh.shared.errors import (
    FieldPath,
    InvalidInput,
    NotFound,
    PayloadTooLarge,
    field_name,
)

INLINE_MEDIA_BYTES: Final = 16 * 1024
"""Data URIs longer than this travel by reference instead of in the message."""

BLOB_SCHEME: Final = "blob:"
"""Marks a reference to the blob store for the tokenizer; clients may not use it."""

_DATA_SCHEME: Final = "data:"
_SOURCE_FIELDS: Final = (
    "image_url",
    "image",
    "video_url",
    "video",
    "audio_url",
    "audio",
    "file_id",
    "url",
)
_RECORDING: Final = "input_audio"
"""A part whose `data` is a file in base64, without the head of a data URI."""
_BASE64_CHARS_PER_BYTE: Final = 4 / 3


async def move_inline_media(messages: Sequence[Any], uploads: Uploads, access: Access) -> None:
    """Replace large data URIs by `blob:` URLs, in place, and lend uploads to the tokenizer.

    Raises InvalidInput, and NotFound for a file that is not there for `access`.
    """
    turns, settings = Turns(), uploads.settings
    for path, holder, key in _sources(messages):
        await turns.rest()
        url = holder[key]
        if url.startswith(BLOB_SCHEME):
            raise _invalid(path, "the scheme blob: is internal: send a URL or a data URI")
        if url.startswith(f"{ID_PREFIX}-"):
            await _lend(url, path, uploads, access)
        is_uri = url.startswith(_DATA_SCHEME)
        if (is_uri or key == "data") and len(url) > INLINE_MEDIA_BYTES:
            uri = url if is_uri else f"{_DATA_SCHEME};base64,{url}"
            data = await _decode(uri, path, settings.max_media_bytes)
            holder[key] = BLOB_SCHEME + await uploads.blobs.put(data, ttl_s=settings.media_ttl_s)


async def _lend(file_id: str, path: FieldPath, uploads: Uploads, access: Access) -> None:
    try:
        await uploads.lend(file_id, access)
    except (NotFound, PayloadTooLarge) as error:
        raise type(error)(
            f"{field_name(path)}: {error.message}", param="messages", path=path
        ) from error


def _sources(messages: Sequence[Any]) -> Iterator[tuple[FieldPath, dict[str, Any], str]]:
    """Paths of parts that name a medium, each with the object and its key that holds the URL."""
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for number, part in enumerate(content):
            if isinstance(part, dict):
                path = ("messages", index, "content", number)
                yield from ((path, *found) for found in _sources_of(part))


def _sources_of(part: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    recording = part.get(_RECORDING)
    if isinstance(recording, dict) and isinstance(recording.get("data"), str):
        yield recording, "data"
    for name in _SOURCE_FIELDS:
        value = part.get(name)
        if isinstance(value, str):
            yield part, name
        elif isinstance(value, dict):
            yield from _sources_of(value)


async def _decode(url: str, path: FieldPath, max_bytes: int) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise _invalid(path, "a data URI must be of the form data:<type>;base64,...")
    if len(body) > max_bytes * _BASE64_CHARS_PER_BYTE + 4:
        raise PayloadTooLarge(
            f"{field_name(path)}: the file has more than {max_bytes} bytes "
            "(gateway.max_media_bytes)",
            path=path,
        )
    try:
        return await asyncio.to_thread(decode_base64, body)
    except ValueError as error:
        raise _invalid(path, "the file is not base64") from error


def _invalid(path: FieldPath, problem: str) -> InvalidInput:
    return InvalidInput(f"{field_name(path)}: {problem}", param="messages", path=path)
