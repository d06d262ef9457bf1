"""IndexWriter: keeps this worker's keys in Redis correct; the worker goes on without Redis.

No other process writes these keys. After a failed write, or when a set has another size than
expected, or keys are missing or older than the last write, everything is written to a new set,
which then replaces the old one.
"""

import asyncio
import logging
import math
from collections.abc import Mapping
from itertools import islice
from typing import Final, cast

from tokenmesh.engine.kv.route_ledger import RouteChange
from tokenmesh.services.worker_svc.prefix_index.indexed import ExpiredReservations, IndexedBlocks
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.placement import PrefixIndexSettings
from tokenmesh.shared.errors import TokenMeshError, Unavailable
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import RELEASE, IndexKeys
from tokenmesh.shared.redis import Part, Redis

logger = logging.getLogger(__name__)

MAX_RELEASES: Final = 16_384
"""Reservations that may wait to be given back; beyond, their time ends them."""

_RELEASES_PER_CALL: Final = 256
_OVER: Final = -1


class IndexWriter:
    """Fed by the event loop; one task, `run`, writes."""

    def __init__(
        self,
        redis: Redis,
        model: ModelName,
        worker_id: WorkerId,
        epoch: int,
        settings: PrefixIndexSettings,
        metrics: Metrics,
    ) -> None:
        keys = IndexKeys(model)
        self._redis = redis
        self._settings = settings
        self._blocks = keys.blocks(worker_id, epoch)
        self._rewrite_to = keys.rewrite(worker_id, epoch)
        self._digest = keys.digest(worker_id, epoch)
        self._reserved = keys.reserved(worker_id, epoch)
        self._names = (self._digest, self._blocks, self._reserved)
        self._keys = keys
        self._release_script = redis.script(RELEASE)
        self._ttl_ms = round(settings.ttl_s * 1000)
        self._resident = IndexedBlocks(settings.max_changes)
        self._due: dict[str, int] = {}
        """By field: tokens that are left of a reservation; `_OVER`: it is to be given back."""
        self._forgotten = ExpiredReservations(settings.reservation_s, MAX_RELEASES)
        self._looked_s = -math.inf
        self._has_news = asyncio.Event()
        self._has_news.set()
        self._writing = asyncio.Lock()
        self._seq = 0
        self.is_current = False
        """It tells whether Redis took the last that there was to say."""
        labels = {"model_name": str(model), "engine": str(worker_id)}
        self._rewrites = metrics.counter("prefix_index_rewrites", **labels)
        metrics.gauge_of("prefix_index_current", lambda: self.is_current, **labels)
        metrics.gauge_of("prefix_index_blocks", lambda: len(self._resident), **labels)

    def note(self, change: RouteChange) -> None:
        """Route blocks were added or removed."""
        self._resident.apply(change)
        self._has_news.set()

    def release(self, reservation: str) -> None:
        """A reserved stream has its first token, or never will."""
        self._owe(self._keys.reserved_by(reservation)[1], _OVER)

    def note_progress(self, prefilling: Mapping[str, int]) -> None:
        """By reservation, how many of its tokens are still to be computed."""
        for reservation, num_tokens in prefilling.items():
            field = self._keys.reserved_by(reservation)[1]
            if self._due.get(field) != _OVER:
                self._owe(field, num_tokens)

    def _owe(self, field: str, num_tokens: int) -> None:
        if field in self._due or len(self._due) < MAX_RELEASES:
            self._due[field] = num_tokens
            self._has_news.set()

    async def run(self) -> None:
        """Write changes; a heartbeat when there are none."""
        while True:
            await self._wait_for_news()
            # several steps of the engine, one write
            await asyncio.sleep(self._settings.write_interval_s)
            self._has_news.clear()
            if not await self.flush():
                await asyncio.sleep(self._settings.retry_s)

    async def close(self) -> None:
        """Leave nothing behind; `run` writes no more."""
        try:
            async with asyncio.timeout(self._settings.retry_s):
                await self._writing.acquire()
                await self._redis.call("DEL", *self._names, self._rewrite_to)
        except (TokenMeshError, TimeoutError) as error:
            logger.info("keys in the prefix index are not deleted and will expire: %s", error)

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(self._settings.heartbeat_s):
                await self._has_news.wait()
        except TimeoutError:
            return

    async def flush(self) -> bool:
        """Write all there is to say, if only a heartbeat; whether Redis took it."""
        async with self._writing:
            return await self._write()

    async def _write(self) -> bool:
        try:
            if not self._resident.must_rewrite:
                await self._write_changes()
            if self._resident.must_rewrite:
                await self._write_all()
            await self._update_reservations()
        except TokenMeshError as error:
            self._resident.lose()
            self._has_news.set()
            if self.is_current:
                logger.warning("cannot write to the prefix index: %s", error.message)
            self.is_current = False
            return False
        self.is_current = not self._resident.must_rewrite
        return True

    async def _write_changes(self) -> None:
        added, removed = self._resident.take_changes()
        commands: list[list[Part]] = [["SADD", self._blocks, *each] for each in self._cut(added)]
        commands += [["SREM", self._blocks, *each] for each in self._cut(removed)]
        await self._commit(commands)

    async def _write_all(self) -> None:
        self._rewrites.inc()
        hashes = self._resident.take_all()
        num, xor = len(hashes), self._resident.xor
        await self._redis.call("DEL", self._rewrite_to)
        for each in self._cut(hashes):
            add: list[Part] = ["SADD", self._rewrite_to, *each]
            await self._redis.transact([add, ["PEXPIRE", self._rewrite_to, self._ttl_ms]])
        take: list[Part] = ["RENAME", self._rewrite_to, self._blocks]
        self._seq = 0
        await self._commit(
            [["DEL", self._digest, self._blocks], *([take] if num else [])], num, xor
        )

    async def _commit(
        self, commands: list[list[Part]], num: int | None = None, xor: int | None = None
    ) -> None:
        """With the digest, at once; what Redis then holds must have the size that it should, and
        must have had the write before: a Redis that was put back to an earlier state has not."""
        num = len(self._resident) if num is None else num
        xor = self._resident.xor if xor is None else xor
        self._seq += 1
        commands.append(["HSET", self._digest, "n", num, "xor", f"{xor:016x}"])
        commands += [["PEXPIRE", name, self._ttl_ms] for name in self._names]
        commands += [["HINCRBY", self._digest, "seq", 1], ["SCARD", self._blocks]]
        *_, seq, size = await self._redis.transact(commands)
        if (seq, size) != (self._seq, num):
            logger.warning(
                "the prefix index held %s blocks of %d after %s writes of %d: writing it anew",
                size,
                num,
                seq,
                self._seq,
            )
            self._resident.lose()
            self._has_news.set()

    def _cut(self, hashes: list[bytes]) -> list[list[bytes]]:
        size = self._settings.write_batch
        return [hashes[first : first + size] for first in range(0, len(hashes), size)]

    async def _update_reservations(self) -> None:
        """Release what is due; unreadable reservations are deleted."""
        try:
            await self._look_for_forgotten()
            await self._give_back()
        except Unavailable:
            raise
        except TokenMeshError as error:
            logger.warning("deleting unreadable reservations on this worker: %s", error.message)
            await self._redis.call("DEL", self._reserved)

    async def _look_for_forgotten(self) -> None:
        now_s = monotonic_s()
        if now_s - self._looked_s < self._settings.heartbeat_s:
            return
        self._looked_s = now_s
        fields = await self._redis.call("HKEYS", self._reserved)
        names = [str(each, "utf-8", "replace") for each in cast("list[bytes]", fields) if each]
        for each in self._forgotten.look(names, now_s):
            self._owe(each, _OVER)

    async def _give_back(self) -> None:
        while self._due:
            batch = dict(islice(self._due.items(), _RELEASES_PER_CALL))
            pairs: list[Part] = [each for pair in batch.items() for each in pair]
            await self._release_script([self._reserved], pairs)
            for each, num_tokens in batch.items():
                if self._due.get(each) == num_tokens:
                    del self._due[each]
