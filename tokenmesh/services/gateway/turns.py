"""Turns: work for one request that gives way to all others every few milliseconds."""

import asyncio
from typing import Final

from tokenmesh.shared.clock import monotonic_s

_TURN_S: Final = 0.002


class Turns:
    """For one piece of work. Call `rest` between steps that are short themselves."""

    def __init__(self) -> None:
        self._end_s = monotonic_s() + _TURN_S

    async def rest(self) -> None:
        """Let the event loop look around when the turn is over."""
        if monotonic_s() > self._end_s:
            await asyncio.sleep(0)
            self._end_s = monotonic_s() + _TURN_S
