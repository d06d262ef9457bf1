"""HeldBlocks: the prefix cache according to its events, for snapshots and for the digest."""

from collections.abc import Iterator
from typing import NamedTuple

from tokenmesh.engine.kv.block_log import (
    BlockChange,
    RemovedBlocks,
    StoredBlocks,
)
from tokenmesh.shared.hashing import extra_keys_of
from tokenmesh.shared.messages.blocks import ExtraKey
from tokenmesh.shared.tokens import pack_ids

_DIGEST_BYTES = 8


class Block(NamedTuple):
    """One block that can be found."""

    block_hash: bytes
    parent: bytes | None
    token_ids: bytes
    """Packed."""
    lora: str | None
    extras: list[ExtraKey]


class HeldBlocks:
    """By hash, in the order in which they came. No I/O."""

    def __init__(self, block_size: int, kv_code: str = "") -> None:
        """kv_code: the 8-bit type of the KV cache."""
        self._block_size = block_size
        self._kv_code = kv_code
        self._blocks: dict[bytes, Block] = {}
        self.digest = 0
        """See `BlocksHeld.digest`."""

    def __len__(self) -> int:
        return len(self._blocks)

    def all(self) -> list[Block]:
        """A copy that stays as it is."""
        return list(self._blocks.values())

    def apply(self, change: BlockChange) -> Iterator[Block | bytes | None]:
        """Apply a change and yield its items: a new block, a removed hash, None: cleared."""
        if isinstance(change, StoredBlocks):
            for block in self._blocks_of(change):
                self._blocks[block.block_hash] = block
                self._note(block.block_hash)
                yield block
        elif isinstance(change, RemovedBlocks):
            for block_hash in change.hashes:
                if self._blocks.pop(block_hash, None) is not None:
                    self._note(block_hash)
                    yield block_hash
        else:
            self._blocks.clear()
            self.digest = 0
            yield None

    def _note(self, block_hash: bytes) -> None:
        self.digest ^= int.from_bytes(block_hash[:_DIGEST_BYTES], "little")

    def _blocks_of(self, change: StoredBlocks) -> Iterator[Block]:
        request, size = change.request, self._block_size
        salt, lora, media = change.salt, request.spec.lora, request.spec.media
        has_extras = bool(media or self._kv_code) or lora is not None or salt is not None
        parent = change.hashes[change.first - 1] if change.first else None
        for index in range(change.first, change.end):
            start, end = index * size, (index + 1) * size
            extras: list[ExtraKey] = []
            if has_extras:
                extras = extra_keys_of(
                    start,
                    end,
                    lora=lora,
                    salt=salt,
                    media=media,
                    kv_code=self._kv_code,
                    embeds=request.prepared.embeds_keys,
                )
            block_hash = change.hashes[index]
            token_ids = pack_ids(request.token_ids[start:end])
            name = None if lora is None else lora.name
            yield Block(block_hash, parent, token_ids, name, extras)
            parent = block_hash
