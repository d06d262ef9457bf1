"""ClientWatch: notices a disconnected client, whatever its request waits for."""

import asyncio
from types import TracebackType
from typing import Final

from starlette.types import Receive

from tokenmesh.shared.errors import Cancelled

_DISCONNECT: Final = "http.disconnect"


class ClientWatch:
    """Cancels its block when the client disconnects; the block then raises Cancelled.

    A client that reads no bytes for `patience_s` (at most twice as long) counts as disconnected.
    One timer checks that: a timer for each write would cost as much as the write.
    """

    def __init__(self, receive: Receive, patience_s: float) -> None:
        self._receive = receive
        self._patience_s = patience_s
        self.has_left = False
        """Whether the block was cancelled for this reason."""
        self.is_writing = False
        """Set by the writer during each write."""
        self.num_writes = 0
        """Set by the writer."""
        self._num_seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ClientWatch":
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        self._check_later()
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
        """The response is complete: ignore what the client does from now on."""
        # Break a reference cycle over the task's traceback.
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()

    def give_up(self) -> None:
        """Treat the client as disconnected."""
        if self._task is not None and not self.has_left:
            self.has_left = True
            self._task.cancel()

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._patience_s, self._check)

    def _check(self) -> None:
        if self.is_writing and self.num_writes == self._num_seen:
            self.give_up()
            return
        self._num_seen = self.num_writes
        self._check_later()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != _DISCONNECT:
            continue
        self.give_up()
