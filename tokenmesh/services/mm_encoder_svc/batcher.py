"""Batcher: gathers items that arrive within a short time into one call of the tower."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tokenmesh.shared.config.model import EncoderSettings
from tokenmesh.shared.errors import Overloaded, TokenMeshError
from tokenmesh.shared.tensor_blob import TensorBlob

_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The features that a processor made of one item."""

    kind: str
    tensors: Mapping[str, TensorBlob]
    num_embeddings: int
    """The number of places for embeddings in the prompt."""
    part: tuple[str, str] | None = None
    """For a part of speech, the content hashes of the part before (empty: it is the first) and of
    this one."""

    @property
    def shape(self) -> tuple[object, ...]:
        """Items of equal shapes go through a tower together; a part of speech goes alone."""
        tensors = sorted(self.tensors.items())
        shapes = ((name, each.dtype, each.shape[1:]) for name, each in tensors)
        return (self.kind, self.part, *shapes)


class StateLost(TokenMeshError):
    """The tower's state after a part of speech is not kept any more."""

    code = "state_lost"


EncodeBatch = Callable[[list[Features]], list[TensorBlob]]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    features: Features
    result: "asyncio.Future[TensorBlob]"


class Batcher:
    """The queue of one tower, which runs in a separate thread; `run` must be running."""

    def __init__(self, encode: EncodeBatch, limits: EncoderSettings) -> None:
        self._encode = encode
        self._limits = limits
        self._queue: deque[_Waiting] = deque()
        self._arrival = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")

    async def submit(self, features: Features) -> TensorBlob:
        """The embeddings of one item. Raises Overloaded when the queue is full."""
        if len(self._queue) >= self._limits.queue:
            raise Overloaded(
                "too many media wait to be encoded (encoder.queue)", retry_after_s=_RETRY_AFTER_S
            )
        waiting = _Waiting(features, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._arrival.set()
        return await waiting.result

    async def run(self) -> None:
        """Encode batch after batch until cancelled."""
        while True:
            await self._arrival.wait()
            if len(self._queue) < self._limits.max_batch:
                await asyncio.sleep(self._limits.batch_window_s)
            if batch := self._take():
                await self._run_batch(batch)
            if not self._queue:
                self._arrival.clear()

    def stop(self) -> None:
        """End the thread after its current batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> list[_Waiting]:
        """The oldest items, up to a batch, except those whose requests were cancelled."""
        batch: list[_Waiting] = []
        left = self._limits.max_batch_embeddings
        while self._queue and len(batch) < self._limits.max_batch:
            waiting = self._queue[0]
            if not waiting.result.done():
                left -= waiting.features.num_embeddings
                if batch and left < 0:
                    break
                batch.append(waiting)
            self._queue.popleft()
        return batch

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        features = [waiting.features for waiting in batch]
        try:
            embeddings = await loop.run_in_executor(self._thread, self._encode, features)
        # Any error of the tower must reach the requests that wait.
        except Exception as error:
            if len(batch) > 1:  # an item that cannot be encoded fails alone
                for waiting in batch:
                    await self._run_batch([waiting])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        for waiting, embedding in zip(batch, embeddings, strict=True):
            if not waiting.result.done():
                waiting.result.set_result(embedding)
