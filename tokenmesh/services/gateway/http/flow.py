"""Flow: uvicorn's flow control with a second reason to read nothing, bytes not parsed yet."""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Reads while neither a request's buffer is full nor the connection has a backlog."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_held = False
        self._is_full = False

    def pause_reading(self) -> None:
        """A request has enough for now."""
        self._is_full = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """A request wants more."""
        self._is_full = False
        self._resume()

    def hold(self, is_held: bool) -> None:
        """Whether there is a backlog."""
        self._is_held = is_held
        if is_held:
            super().pause_reading()
        else:
            self._resume()

    def _resume(self) -> None:
        if not self._is_held and not self._is_full:
            super().resume_reading()
