"""Counts gateways that run, so that a test which leaves one is named."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

_CORE: Final = "tokenmesh.services.gateway.core.gateway_core"


class LeftGateways:
    """Watches `Core.run` from the first test on after which the gateway is imported."""

    def __init__(self) -> None:
        self._num_running = 0

    def pop_left(self) -> int:
        """Return how many have not ended, and forget them."""
        module: Any = sys.modules.get(_CORE)
        if module is not None and not hasattr(module.Core.run, "is_watched"):
            module.Core.run = self._watched(module.Core.run)
        left, self._num_running = self._num_running, 0
        return left

    def _watched(self, run: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def watched(core: Any) -> None:
            self._num_running += 1
            try:
                await run(core)
            finally:
                self._num_running -= 1

        setattr(watched, "is_watched", True)  # noqa: B010
        return watched


LEFT_GATEWAYS: Final = LeftGateways()
