"""ClientWatch: notices that a client has left, whatever its request is waiting for."""

import asyncio
from types import TracebackType
from typing import Final

from starlette.types import Receive

from tokenmesh.shared.errors import Cancelled

_DISCONNECT: Final = "http.disconnect"


class ClientWatch:
    """Cancels the block when the client leaves; the block then ends with Cancelled."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ClientWatch":
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()
        is_ours = self._has_left and kind is asyncio.CancelledError
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
        if self._task is not None and not self._has_left:
            self._has_left = True
            self._task.cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != _DISCONNECT:
            continue
        self.give_up()
