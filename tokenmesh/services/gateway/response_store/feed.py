"""Feed: the events of a response for the one client that is connected while it is made."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from tokenmesh.services.gateway.response_store.records import Ended, Record, frames_of
from tokenmesh.shared.errors import TokenMeshError


class Feed:
    """Frames in order, one reader. Past the bound the reader has to go on from the log."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._error: TokenMeshError | None = None
        self._is_closed = False
        self._news = asyncio.Event()
        self.num_read = 0
        """Frames that the reader has had."""
        self.ended: Ended | None = None

    def push(self, records: Sequence[Record]) -> None:
        """Add what was made."""
        for record in records:
            if isinstance(record, Ended):
                self.ended = record
            if self._num_bytes > self._max_bytes:
                self._is_closed = True
            if not self._is_closed:
                frames = frames_of(record)
                self._frames.extend(frames)
                self._num_bytes += sum(len(frame) for frame in frames)
        self._news.set()

    def close(self, error: TokenMeshError | None = None) -> None:
        """There will be no more from here."""
        self._is_closed = True
        self._error = error
        self._news.set()

    async def read(self) -> AsyncIterator[bytes]:
        """What has arrived since the last time, joined. Raises what `close` was given."""
        while True:
            if not self._frames and not self._is_over:
                await self._news.wait()
            self._news.clear()
            frames, self._frames, self._num_bytes = self._frames, [], 0
            if frames:
                self.num_read += len(frames)
                yield b"".join(frames)
            elif self._error is not None:
                raise self._error
            elif self._is_over:
                return

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self.ended is not None
