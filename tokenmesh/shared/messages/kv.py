"""Messages between workers: a reader asks a source for images of a prompt's blocks.

Both count the same keys: of the whole blocks of the prompt, and in each block of its KV groups.
"""

import msgspec

from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages.generate import Generate


class PrefillKv(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Keep images for a reader. Answered with KvStarted, Refused or Failed.

    A repeated one of the same reader, stream and attempt gets the same lease.
    """

    generate: Generate
    """As the reader got it, with the epoch of the source."""
    reader: WorkerId
    scope: bytes
    num_blocks: int
    last_key: bytes
    """The hash of the last of them, which covers all before: the source must find the same."""
    computes: bool = False
    """Compute what is not there; else only what is there counts."""
    hashes: bytes = b""
    """All hashes up to that one, where the prompt has embeddings of a client and is not computed:
    the source, which does not fetch them, cannot know these."""


class KvStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The lease, by which the reader may poll and read."""

    lease: int
    token: bytes
    lease_s: float
    """It ends so long after the last poll."""
    addresses: dict[str, bytes]
    """Where the transfer process is read, by transport."""


class PollKv(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Ask what else is there. Answered with KvReady when there is more, at the latest after a
    quarter of a second, or with Failed."""

    lease: int
    token: bytes
    have: int
    """Keys from the first on that need no answer."""


class KvReady(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Images that can be read now."""

    first: int
    """The number of the first of their keys."""
    slots: bytes = b""
    """They are slots of the source's arena, uint32 each, little-endian."""
    checksums: bytes = b""
    """xxh3_64 of each image."""
    computed: int = 0
    """Tokens that the source has computed for this lease."""
    is_done: bool = False
    """There will be no more."""


class ReleaseKv(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The reader needs the lease no more. Answered with Done."""

    lease: int
    token: bytes
