"""Route-block hashes: what placement knows about a prompt, and what makes equal tokens differ.

A chain over fixed-size blocks: each hash covers its parent, the block's ids and the block's extras
(adapter, salt, media). A hash that collides only misroutes a request; it never shares KV, since the
engine checks hashes of its own.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import xxhash

from tokenmesh.shared.messages.blocks import ExtraKey
from tokenmesh.shared.messages.media import EMBEDS, MediaItem
from tokenmesh.shared.tokens import BYTES_PER_ID

ROUTE_BLOCK_TOKENS: Final = 64
"""Tokens in a route block; a multiple of every engine block size."""

HASH_BYTES: Final = 8
"""Short, as the index in Redis has one for each block; a collision only misroutes (see above)."""
_HASH_VERSION: Final = 1

_TAG_BY_KIND: Final = {
    "lora": b"L",
    "salt": b"S",
    "media": b"M",
    "kv_dtype": b"K",
    "prompt_embeds": b"E",
}
EmbedsKeys = Mapping[int, Sequence[ExtraKey]]
"""Keys of a client's embeddings by the first position of their block."""
NO_KEYS: Final[EmbedsKeys] = MappingProxyType({})


class Adapter(NamedTuple):
    """The adapter with which a block was computed."""

    name: str
    content_hash: str = ""
    """The hash of its weights: another adapter under the same name has other KV. Empty in route
    hashes, which are made where weights are not known and only guess what a worker holds."""


def route_scope(model: str, fingerprint: str, block_size: int) -> bytes:
    """Where two prompts with equal ids may share a prefix at all: the head of every chain."""
    fields = (model.encode(), fingerprint.encode(), str(block_size).encode())
    return b"".join(_tagged(b"%d" % _HASH_VERSION, field) for field in fields)


def chain_head(scope: bytes) -> bytes:
    """8 bytes: what the first block's hash is chained to."""
    return xxhash.xxh3_64_digest(scope)


def extra_keys_for_block(
    start: int,
    end: int,
    *,
    lora: Adapter | None,
    salt: str | None,
    media: Sequence[MediaItem],
    kv_code: str = "",
    embeds: EmbedsKeys = NO_KEYS,
) -> bytes:
    """Return what the block of positions [start, end) holds besides its ids; empty for most blocks.

    Tagged and length-prefixed, so that no two different sets of extras give the same bytes.
    """
    keys = extra_keys_of(
        start, end, lora=lora, salt=salt, media=media, kv_code=kv_code, embeds=embeds
    )
    return b"".join(map(_packed, keys))


def extra_keys_of(
    start: int,
    end: int,
    *,
    lora: Adapter | None,
    salt: str | None,
    media: Sequence[MediaItem],
    kv_code: str = "",
    embeds: EmbedsKeys = NO_KEYS,
) -> list[ExtraKey]:
    """The same in words.

    The salt and the 8-bit type of the KV cache (`kv_code`) are in block 0 only and taint the chain;
    media count where their placeholders are. `embeds`: stand for the items that are embeddings of
    a client; without any these count as media.
    """
    keys = []
    if kv_code and start == 0:
        keys.append(ExtraKey(kind="kv_dtype", value=kv_code))
    if lora is not None:
        value = f"{lora.name}@{lora.content_hash}" if lora.content_hash else lora.name
        keys.append(ExtraKey(kind="lora", value=value))
    if salt is not None and start == 0:
        keys.append(ExtraKey(kind="salt", value=salt))
    for item in media:
        if embeds and item.kind == EMBEDS:
            continue
        if item.offset < end and start < item.offset + item.length:
            place = item.offset - start
            keys.append(ExtraKey(kind="media", value=item.content_hash, offset=place))
    return [*keys, *embeds.get(start, ())]


def route_hashes(
    token_ids: bytes,
    block_size: int,
    scope: bytes,
    lora: str | None = None,
    salt: str | None = None,
    media: Sequence[MediaItem] = (),
) -> bytes:
    """8 little-endian bytes for each full block of packed `token_ids` (see shared/tokens.py)."""
    block_bytes = block_size * BYTES_PER_ID
    hashes = []
    parent = chain_head(scope)
    adapter = None if lora is None else Adapter(lora)
    has_extras = lora is not None or salt is not None or bool(media)
    for index in range(len(token_ids) // block_bytes):
        block = parent + token_ids[index * block_bytes : (index + 1) * block_bytes]
        if has_extras:
            start = index * block_size
            block += extra_keys_for_block(
                start, start + block_size, lora=adapter, salt=salt, media=media
            )
        parent = xxhash.xxh3_64_digest(block)
        # xxhash's canonical digest is big-endian; the wire and Lua want little-endian.
        hashes.append(parent[::-1])
    return b"".join(hashes)


def _packed(key: ExtraKey) -> bytes:
    value = key.value.encode()
    if key.kind in ("media", "prompt_embeds"):
        value += key.offset.to_bytes(4, "little", signed=True)
    return _tagged(_TAG_BY_KIND[key.kind], value)


def _tagged(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value
