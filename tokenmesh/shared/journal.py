"""Journal: an append-only log for each key that outlives every process. JetStream holds it.

`append` names the entry that it follows, so of two writers of a key only one succeeds: that
fences off a process whose log another one has taken over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenmesh.shared.bus.base import Subscription
from tokenmesh.shared.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a key's log."""

    sequence: int
    """Grows along the log, with gaps: all keys count together."""
    data: bytes


class StoreFull(Overloaded):
    """There is no room for another entry."""


class Journal(Protocol):
    """Logs by key. A key is a NATS subject that belongs to the journal.

    Every method raises Unavailable (or a subclass, or DeadlineExceeded) when the store does not
    answer in time; an `append` that raised it may have been stored all the same.
    """

    async def prepare(self) -> None:
        """Make sure that there is something to append to; nothing to do the second time."""

    @property
    def max_entry_bytes(self) -> int:
        """The size of the largest entry that is taken."""

    async def append(self, key: str, data: bytes, after: int) -> int:
        """Add an entry right after the one numbered `after` (0: the log is empty); its number.

        Raises Conflict when another entry is the last, PayloadTooLarge, or StoreFull. Retries
        after a timeout, and recognizes an entry of its earlier attempt.
        """

    async def add(self, key: str, data: bytes) -> None:
        """Add an entry to a log that has one writer; after a retry it may be there twice.

        Raises PayloadTooLarge or StoreFull. JetStream keeps what `append` has written lately in
        memory, since it looks for the entry before; this does not.
        """

    async def read(
        self, key: str, after: int, limit: int, num_before: int | None = None
    ) -> list[Entry]:
        """At most `limit` entries after number `after`, in order; none: that was the last.

        A store of several replicas may know of a further one already. It does not where all of a
        log is read, with the number of entries read before, or nothing after 0 is found.
        """

    async def last(self, key: str) -> Entry | None:
        """The last entry, or one shortly before it; None: the store is sure that there is none."""

    async def purge(self, key: str, keep: int = 0) -> None:
        """Delete a key's log but for its last `keep` entries.

        Without any the next append of its writer raises Conflict.
        """

    async def keys(self, pattern: str) -> list[str]:
        """The keys that have entries; `pattern` is a key with NATS wildcards."""

    async def num_bytes(self) -> int:
        """The size of all entries together, as the store counts it."""

    async def watch(self, key: str, on_append: Callable[[], None]) -> Subscription:
        """Call `on_append` soon after each append, refused ones included; a hint, may be lost."""
