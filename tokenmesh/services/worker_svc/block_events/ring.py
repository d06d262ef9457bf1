"""Ring: the last batches of this incarnation, encoded, numbered from 0."""

from collections import deque


class Ring:
    """Bounded in batches and in bytes; the newest is always there."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[bytes] = deque()
        self.num_bytes = 0
        self.next_seq = 0
        """Of the batch to come."""

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def oldest_seq(self) -> int:
        """Of the first batch that is held; `next_seq` while there is none."""
        return self.next_seq - len(self._batches)

    def add(self, batch: bytes) -> None:
        """Hold a batch, which has the number `next_seq`; the oldest may have to go."""
        self._batches.append(batch)
        self.num_bytes += len(batch)
        self.next_seq += 1
        while len(self._batches) > 1 and self._is_over():
            self.num_bytes -= len(self._batches.popleft())

    def _is_over(self) -> bool:
        return len(self._batches) > self._max_batches or self.num_bytes > self._max_bytes

    def holds(self, seq: int) -> bool:
        """Whether all from `seq` on are there; so they are when `seq` is the next one."""
        return self.oldest_seq <= seq <= self.next_seq

    def page(self, seq: int, max_bytes: int) -> list[bytes]:
        """Batches from a held `seq` on, up to about `max_bytes`, at least one if there is any."""
        found: list[bytes] = []
        num_bytes = 0
        # a deque finds its n-th entry from the nearer end
        for at in range(seq - self.oldest_seq, len(self._batches)):
            batch = self._batches[at]
            num_bytes += len(batch)
            if found and num_bytes > max_bytes:
                break
            found.append(batch)
        return found
