"""Feed: the events of a response for the one client that is connected while it is made."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from tokenmesh.services.gateway.responses.records import Ended, Record, frames_of
from tokenmesh.shared.errors import TokenMeshError


class Feed:
    """Frames in order, one reader. A reader that is too far behind has to go on elsewhere."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._is_full = False
        self._is_closed = False
        self._error: TokenMeshError | None = None
        self._news = asyncio.Event()
        self.num_read = 0
        """Frames that the reader has had."""
        self.ended: Ended | None = None

    def push(self, records: Sequence[Record]) -> None:
        """Add what was made."""
        for record in records:
            if isinstance(record, Ended):
                self.ended = record
            frames = frames_of(record)
            self._num_bytes += sum(map(len, frames))
            self._is_full = self._is_full or self._num_bytes > self._max_bytes
            if not self._is_full:
                self._frames.extend(frames)
        self._news.set()

    @property
    def is_cut(self) -> bool:
        """Whether there is more of the response than could be read here."""
        return self._is_full or self.ended is None

    def leave(self) -> None:
        """Nobody reads any more: keep nothing but the end."""
        self._is_full = True
        self._frames = []
        self._news.set()

    def close(self, error: TokenMeshError | None = None) -> None:
        """There will be no more from here."""
        self._is_closed = True
        self._error = error
        self._news.set()

    async def read(self) -> AsyncIterator[bytes]:
        """What has arrived since the last time, joined, until nothing more can come from here.

        Raises what `close` was given, unless the end of the response has been read.
        """
        while True:
            if not self._frames and not self._is_over:
                await self._news.wait()
            self._news.clear()
            frames, self._frames = self._frames, []
            if not self._is_full:
                self._num_bytes = 0
            if frames:
                self.num_read += len(frames)
                yield b"".join(frames)
            elif self._error is not None and self.ended is None:
                raise self._error
            elif self._is_over:
                return

    async def end(self) -> Ended | None:
        """The last record, once the run is over. Raises what `close` was given."""
        while not self._is_closed:
            await self._news.wait()
            self._news.clear()
        if self._error is not None:
            raise self._error
        return self.ended

    @property
    def _is_over(self) -> bool:
        return self._is_full or self._is_closed or self.ended is not None
