"""StoreWriter: has stores keep what comes into the host tier, behind the steps.

It is written when it is there and not when it gives way, so that a worker which is killed leaves
nearly all of it. Where stores are slower than the worker computes, images give way unwritten.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.services.worker_svc.kv.asking import ask
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.thread import EngineHost
from tokenmesh.shared.errors import TokenMeshError

logger = logging.getLogger(__name__)

_BATCH: Final = 64
"""Images that are pinned at a time."""
_FAILED_PAUSE_S: Final = 1.0


@dataclass(slots=True)
class StoreWriter:
    """One batch at a time."""

    shared: SharedKv
    host: EngineHost
    process: TransferProcess
    is_awake: Callable[[], bool]
    """Nothing is written of a worker that goes to sleep: its host tier is emptied."""
    on_written: Callable[[int, float], None]
    """Called after each batch with bytes and seconds."""
    _num_saved: int = 0
    _task: "asyncio.Task[None] | None" = None
    _has_news: bool = field(default=False)

    def note(self, output: StepOutput) -> None:
        """A step has ended: there may be new images."""
        host = output.stats.host
        if host is not None and host.saved != self._num_saved:
            self._num_saved = host.saved
            self.wake()

    def wake(self) -> None:
        """There may be new images."""
        self._has_news = True
        if self._task is None and self.is_awake() and self.process.is_able:
            self._task = asyncio.create_task(self._write())
            self._task.add_done_callback(self._is_over)

    async def settle(self, limit_s: float) -> bool:
        """Return whether nothing is written any more, at the latest after so long.

        Where the worker stays awake, all that is here is written first.
        """
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=limit_s)
        return self._task is None

    def _is_over(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("KV is not written to stores", exc_info=task.exception())

    async def _write(self) -> None:
        while self._has_news and self.is_awake():
            self._has_news = False
            try:
                while self.is_awake() and await self._write_batch():
                    pass
            except (TokenMeshError, TimeoutError) as error:
                logger.warning("KV is not written to stores: %s", error)
                await asyncio.sleep(_FAILED_PAUSE_S)

    async def _write_batch(self) -> bool:
        """Return whether there may be more."""
        keys, slots = await ask(self.host, lambda engine: engine.exchange.lend_unstored(_BATCH))
        if not keys:
            return False
        try:
            ended = await self.process.put(keys, slots)
        finally:
            await ask(self.host, lambda engine: engine.exchange.take_back(keys))
        self.on_written(ended.num_written * self.shared.arena.image_bytes, ended.seconds)
        return not ended.reason
