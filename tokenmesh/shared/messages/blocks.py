"""Messages about a worker's prefix cache, for subscribers outside of the mesh.

Fields and meanings are those of vLLM's KV events where it has them. A worker numbers its batches
from 0 in each epoch; a subscriber requests lost batches again, or reads all blocks.
"""

from typing import Final, Literal

import msgspec

from tokenmesh.shared.ids import ModelName, WorkerId

MEDIUM: Final = "GPU"
"""vLLM's word for the memory that the engine computes in, on a CPU too."""

ExtraKind = Literal["lora", "salt", "media", "kv_dtype", "prompt_embeds"]


class ExtraKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Distinguishes a block besides its token ids and its parent."""

    kind: ExtraKind
    """An adapter's name and, after an @, its content hash; a cache salt (first block only); the
    content hash of a media item; the 8-bit type of the KV cache (first block only); or the type of
    a client's embeddings and, after a colon, the SHA-256 of their rows that are in the block."""
    value: str
    offset: int = 0
    """media, prompt_embeds: where the first placeholder is, in tokens from the block's start."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Consecutive blocks of one prompt can be found in the cache."""

    block_hashes: list[bytes]
    """16 bytes each: BLAKE2b of the parent's (zeros before the first block), ids and extra keys."""
    parent_block_hash: bytes | None = None
    """The hash of the block before the first of these; None: that one begins a prompt."""
    token_ids: bytes
    """Ids of all the blocks, packed as everywhere (`shared/tokens.py`)."""
    block_size: int
    """Tokens of a block."""
    lora_name: str | None = None
    medium: str = MEDIUM
    extra_keys: list[list[ExtraKey]] = []
    """One list for each block; empty: no block has any."""
    group_idx: int = 0
    """There is one group of KV blocks, of full attention."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Blocks can no longer be found: evicted, or never computed after all."""

    block_hashes: list[bytes]
    medium: str = MEDIUM
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Nothing can be found any more: the worker sleeps, or its cache was reset."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Changes of a worker's cache, in order. Published, never answered."""

    worker_id: WorkerId
    epoch: int
    """The worker's incarnation: a new one has an empty cache and begins at 0."""
    seq: int
    model: ModelName
    ts: float
    """When the batch was made, the worker's wall clock."""
    events: list[BlockEvent]
    data_parallel_rank: int = 0
    """A worker is one rank."""


class BlocksHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Tells a subscriber how many batches it must have by now.

    Published at the start and every few seconds.
    """

    worker_id: WorkerId
    epoch: int
    next_seq: int
    """The number of the next batch: all below it are out."""
    model: ModelName
    block_size: int
    num_blocks: int
    digest: int
    """The first 8 bytes, little-endian, of every block hash, all XORed."""
    is_leaving: bool = False
    """The last message of this epoch."""


class ReplayBlockEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request batches that were missed. Answered with BlockEventsReplayed or Failed."""

    epoch: int
    from_seq: int


class BlockEventsReplayed(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A page of batches; request the next page until there are none."""

    epoch: int
    """The worker's own."""
    is_held: bool
    """False: of another epoch, too old, or never published. Read the blocks whole."""
    oldest_seq: int
    """The first that is still held."""
    next_seq: int
    batches: list[bytes] = []
    """Consecutive from `from_seq` on, each as it was published."""


class ReadBlocks(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Request all blocks of a worker's cache. Answered with BlocksRead or Failed."""

    snapshot: str = ""
    """Empty: begin. Else the value of the page before."""
    start: int = 0
    """`next_start` of the page before."""


class BlocksRead(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """A page of a snapshot. All pages show the cache at one moment."""

    epoch: int
    next_seq: int
    """That moment: batches from here on are not in it."""
    snapshot: str
    start: int
    next_start: int | None = None
    """None: this was the last page."""
    num_blocks: int
    """In the whole snapshot."""
    blocks: list[BlockStored] = []
