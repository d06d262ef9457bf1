"""Knows which gateways run and which test began them, so that one that is left is blamed on it."""

import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

Run = Callable[[Any], Coroutine[Any, Any, None]]
_CORE: Final = "tokenmesh.services.gateway.core.gateway_core"


class LeftGateways:
    """Watches `Core.run` from the end of the first test that has imported it."""

    def __init__(self) -> None:
        self._running: dict[object, str] = {}
        self._collected: list[str] = []

    def pop_left(self, *, is_module_over: bool) -> list[str]:
        """Return and forget the tests whose gateways were collected while they were running.

        When the fixtures of a module are gone, also those whose gateways still run.
        """
        module: Any = sys.modules.get(_CORE)
        if module is not None and not hasattr(module.Core.run, "is_watched"):
            module.Core.run = self._watched(module.Core.run)
        left, self._collected = self._collected, []
        if is_module_over:
            left += self._running.values()
            self._running.clear()
        return left

    def _watched(self, run: Run) -> Run:
        async def watched(core: Any) -> None:
            key, test = object(), os.environ.get("PYTEST_CURRENT_TEST", "a fixture")
            self._running[key] = test
            try:
                await run(core)
            except GeneratorExit:
                # The garbage collector ends it: nothing has waited for its task.
                self._collected.append(test)
                raise
            finally:
                self._running.pop(key, None)

        setattr(watched, "is_watched", True)  # noqa: B010
        return watched


LEFT_GATEWAYS: Final = LeftGateways()
