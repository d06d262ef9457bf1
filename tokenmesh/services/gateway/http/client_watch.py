"""ClientWatch: notices that a client has left, whatever its request is waiting for."""

import asyncio
from types import TracebackType
from typing import Final

from starlette.types import Receive

from tokenmesh.shared.errors import Cancelled

_DISCONNECT: Final = "http.disconnect"


class ClientWatch:
    """Cancels the block when the client leaves; the block then ends with Cancelled.

    A client that takes no bytes for `patience_s` (at most twice as long) has left, too. That is
    looked at now and then, because a timer for each write would cost as much as the write.
    """

    def __init__(self, receive: Receive, patience_s: float) -> None:
        self._receive = receive
        self._patience_s = patience_s
        self.has_left = False
        """Whether that is why the block is being cancelled."""
        self.is_writing = False
        """Set and cleared by the writer around each write."""
        self.num_writes = 0
        """Counted by the writer."""
        self._num_seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ClientWatch":
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        self._look_later()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
        is_ours = self.has_left and kind is asyncio.CancelledError
        if is_ours and self._task is not None and self._task.uncancel() == 0:
            raise Cancelled("the client left") from None

    def stop(self) -> None:
        """Look away: the answer is complete, what the client does now is its own business."""
        # Let go of it: its traceback leads back here, and such rings wait for the collector.
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()

    def give_up(self) -> None:
        """Treat the client as gone."""
        if self._task is not None and not self.has_left:
            self.has_left = True
            self._task.cancel()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._patience_s, self._look)

    def _look(self) -> None:
        if self.is_writing and self.num_writes == self._num_seen:
            self.give_up()
            return
        self._num_seen = self.num_writes
        self._look_later()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != _DISCONNECT:
            continue
        self.give_up()
