"""Tensors in place of tokens: `prompt_embeds` of completions, and such parts of a chat's messages.

A tensor goes into the blob store, and its prompt names it like an encoder's output.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tokenmesh.services.gateway.apis.openai.inline_media import BLOB_SCHEME
from tokenmesh.services.gateway.apis.openai.tensor_upload import read_tensor
from tokenmesh.services.gateway.core.http.errors import NotSupported
from tokenmesh.services.gateway.core.http.event_loop import Turns
from tokenmesh.shared.base64_text import decode_base64
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import FieldPath, InvalidInput, field_name
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import EMBEDS, EMBEDS_PART, MediaItem
from tokenmesh.shared.tensor_blob import TensorBlob


async def store_tensor(
    text: str, card: ModelCard, blobs: Blobs, limits: GatewaySettings, path: FieldPath
) -> MediaItem:
    """The tensor of a base64 text, as an item at the beginning of a prompt.

    Raises InvalidInput that names `path`.
    """
    if not limits.prompt_embeds:
        raise _about(path, "is disabled: start the gateway with --enable-prompt-embeds", True)
    try:
        blob = await asyncio.to_thread(_decode, text)
    except ValueError as error:
        raise _about(path, str(error)) from error
    if len(blob.shape) == 3 and blob.shape[0] == 1:
        # a batch of one, as a model's own embedding of ids is
        blob = TensorBlob(blob.dtype, blob.shape[1:], blob.data)
    shape = list(blob.shape)
    if len(shape) != 2 or not shape[0] or shape[1] != card.hidden_size:
        raise _about(path, f"has the shape {shape}, not [tokens, {card.hidden_size}]")
    key = await blobs.put(await asyncio.to_thread(blob.encode), ttl_s=limits.media_ttl_s)
    return MediaItem(
        kind=EMBEDS, content_hash=key, offset=0, length=shape[0], pixels=key, embeddings=key
    )


def _decode(text: str) -> TensorBlob:
    """Raises ValueError with the reason."""
    try:
        data = decode_base64(text)
    except ValueError as error:
        raise ValueError(f"is not base64: {error}") from error
    return read_tensor(data)


def _about(path: FieldPath, problem: str, is_off: bool = False) -> InvalidInput:
    name = field_name(path)
    text = f"{name} {problem}" if problem.startswith(("is ", "has ")) else f"{name}: {problem}"
    kind = NotSupported if is_off else InvalidInput
    # a part of a chat is located in `messages`
    is_part = path[0] == "messages"
    return kind(text, param="messages" if is_part else name, path=path if is_part else ())


_DATA: Final = "data"


def embeds_parts(messages: Sequence[Any]) -> list[tuple[FieldPath, dict[str, Any]]]:
    """The parts of messages that are tensors, with their paths."""
    found: list[tuple[FieldPath, dict[str, Any]]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") == EMBEDS_PART:
                found.append((("messages", index, "content", number), part))
    return found


async def move_tensors(
    parts: Iterable[tuple[FieldPath, dict[str, Any]]],
    card: ModelCard,
    blobs: Blobs,
    limits: GatewaySettings,
) -> None:
    """Put the tensors of `embeds_parts` into the blob store; the parts name them then, in place.

    A part says nothing of a client's after that but its place. Raises InvalidInput.
    """
    turns = Turns()
    for path, part in parts:
        await turns.rest()
        text = part.get(_DATA)
        if not isinstance(text, str) or not text:
            raise _about((*path, _DATA), "is missing: send a tensor in base64")
        item = await store_tensor(text, card, blobs, limits, (*path, _DATA))
        part.clear()
        part |= {"type": EMBEDS_PART, _DATA: f"{BLOB_SCHEME}{item.pixels}", "length": item.length}
