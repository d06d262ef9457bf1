"""An event loop whose clock only moves when every task waits: an hour of timeouts in a second.

Nothing in it depends on the machine's speed, so a run is a function of its seed.
"""

import asyncio
import selectors
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tokenmesh.shared import clock

EPOCH_S = 1_700_000_000.0


class VirtualClock:
    """Stands in for the `time` module inside `shared/clock.py`."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def time(self) -> float:
        return EPOCH_S + self.elapsed_s

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def monotonic(self) -> float:
        return self.elapsed_s

    def perf_counter(self) -> float:
        return self.elapsed_s

    def sleep(self, seconds: float) -> None:
        """Let time pass, outside of any loop."""
        self.elapsed_s += seconds


class _VirtualSelector(selectors.BaseSelector):
    """Never blocks: where a real selector would sleep, the clock jumps."""

    def __init__(self, now: VirtualClock) -> None:
        self._now = now
        self._real = selectors.SelectSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: no task can run and no timer is set")
            self._now.elapsed_s += max(timeout, 0.0)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on a virtual clock."""

    def __init__(self, now: VirtualClock) -> None:
        super().__init__(_VirtualSelector(now))
        self._now = now

    def time(self) -> float:
        return self._now.elapsed_s


@contextmanager
def virtual_time() -> Iterator[VirtualClock]:
    """Replace the clock of the whole package."""
    now = VirtualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", now)
        patch.setattr(clock, "_EPOCH_S", EPOCH_S)
        yield now


def run_virtually(main: "Coroutine[Any, Any, None]", now: VirtualClock) -> None:
    """`asyncio.run` on the virtual clock."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(now)) as runner:
        runner.run(main)
