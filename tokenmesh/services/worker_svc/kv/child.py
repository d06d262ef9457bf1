"""TransferProcess: the worker's side of the process that moves images."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final

import msgspec

from tokenmesh.engine.kv.shared_arena import SharedArena
from tokenmesh.services.worker_svc.kv.orders import (
    LENGTH_BYTES,
    MASTER_PARAM,
    CannotStart,
    Ended,
    Find,
    FoundStored,
    Get,
    MemoryTaken,
    Order,
    Put,
    Read,
    Report,
    Revoke,
    Serve,
    Served,
    Setup,
    Started,
    decode_report,
    framed,
)
from tokenmesh.shared import parent_death
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.environment import sandbox_environment, transfer_environment
from tokenmesh.shared.config.kv import KvSettings
from tokenmesh.shared.errors import ConfigError, Unavailable

logger = logging.getLogger(__name__)

BYTES_PER_S: Final = 50e6
"""The slowest transfer that is waited for goes at this rate."""
_GRACE_S: Final = 1.0
"""A job that is so late is ended with its process."""
_START_S: Final = 20.0
_MOST_STARTS: Final = 5
_WITHIN_S: Final = 60.0
_LONGEST_PAUSE_S: Final = 2.0


class TransferProcess:
    """Starts the process, and starts it again when it ends. When `read` returns, its job is over:
    nothing writes to its slots. It must not be cancelled."""

    def __init__(self, arena: SharedArena, settings: KvSettings, scope: bytes = b"") -> None:
        """scope: of what stores keep."""
        self._arena = arena
        self._scope = scope
        self._settings = settings
        self.addresses: dict[str, bytes] = {}
        """Where others read, by transport; empty while the process does not run."""
        self.is_able = False
        """True while the process runs."""
        self.num_restarts = 0
        self._jobs: dict[int, asyncio.Future[Report]] = {}
        self._numbers = count(1)
        self._process: Process | None = None
        self._starts: deque[float] = deque(maxlen=_MOST_STARTS + 1)
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._mapping: asyncio.Task[None] | None = None
        self._has_lost_pool = False
        """The master of a Mooncake store was gone at a later start."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Raises ConfigError where it cannot listen or use a store, Unavailable where it does not
        start."""
        await self._start()
        self._watch = asyncio.create_task(self._watch_forever())

    async def stop(self) -> None:
        """End the process; its jobs are over."""
        self._is_stopping = True
        self.kill()
        if self._watch is not None:
            await self._watch

    def kill(self) -> None:
        """End all its jobs, the only way that ends each of them."""
        self.addresses, self.is_able = {}, False
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def serve(self, lease: int, token: bytes, slots: Sequence[int]) -> bytes:
        """Let who has the token read these slots too; their checksums. Raises Unavailable."""
        number = next(self._numbers)
        report = await self._do(
            number, Serve(number, lease, token, list(slots)), self._limit(slots)
        )
        if not isinstance(report, Served):
            raise Unavailable("the transfer process has ended")
        return report.sums

    async def revoke(self, lease: int) -> None:
        """Allow no reads by this lease any more. Raises nothing."""
        number = next(self._numbers)
        await self._do(number, Revoke(number, lease), self._settings.transfer_s)

    async def read(
        self,
        addresses: dict[str, bytes],
        lease: int,
        token: bytes,
        remote: Sequence[int],
        slots: Sequence[int],
        sums: bytes,
    ) -> Ended:
        """Read slots of another worker into slots of this one. Raises nothing."""
        number, limit_s = next(self._numbers), self._limit(slots)
        pairs = list(remote), list(slots)
        order = Read(number, addresses, lease, token, *pairs, sums, limit_s)
        report = await self._do(number, order, limit_s)
        if isinstance(report, Ended):
            return report
        return Ended(number, [False] * len(slots), reason="process")

    async def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first of these keys stores have. Raises nothing."""
        number = next(self._numbers)
        report = await self._do(number, Find(number, list(keys)), self._settings.transfer_s)
        return report.count if isinstance(report, FoundStored) else 0

    async def get(self, keys: Sequence[bytes], slots: Sequence[int]) -> Ended:
        """Read images of stores into slots. Raises nothing."""
        number, limit_s = next(self._numbers), self._limit(slots)
        report = await self._do(number, Get(number, list(keys), list(slots), limit_s), limit_s)
        if isinstance(report, Ended):
            return report
        return Ended(number, [False] * len(slots), reason="process")

    async def put(self, keys: Sequence[bytes], slots: Sequence[int]) -> Ended:
        """Have stores keep what is in these slots. Raises nothing."""
        number, limit_s = next(self._numbers), self._limit(slots)
        report = await self._do(number, Put(number, list(keys), list(slots), limit_s), limit_s)
        if isinstance(report, Ended):
            return report
        return Ended(number, [False] * len(slots), reason="process")

    def _limit(self, slots: Sequence[int]) -> float:
        return self._settings.transfer_s + len(slots) * self._arena.image_bytes / BYTES_PER_S

    async def _do(self, number: int, order: Order, limit_s: float) -> Report | None:
        """The report; None: the process has ended."""
        job = self._jobs[number] = asyncio.get_running_loop().create_future()
        self._send(order)
        late = asyncio.get_running_loop().call_later(limit_s + _GRACE_S, self._end_late)
        try:
            return await asyncio.shield(job)
        except Unavailable:
            return None
        finally:
            late.cancel()
            self._jobs.pop(number, None)

    def _end_late(self) -> None:
        logger.error("the transfer process does not end a job: killed")
        self.kill()

    def _send(self, order: Order) -> None:
        process = self._process
        if process is None or process.stdin is None or not self.is_able:
            self._fail_jobs()
        else:
            process.stdin.write(framed(order))

    def _fail_jobs(self) -> None:
        """Only where no process runs."""
        if self._process is not None and self._process.returncode is None:
            return
        for job in self._jobs.values():
            if not job.done():
                job.set_exception(Unavailable("the transfer process has ended"))

    async def _start(self) -> None:
        arena, settings = self._arena, self._settings
        setup = Setup(
            *(arena.file, arena.num_slots, arena.image_bytes, settings.used_transports),
            *(settings.host, settings.port),
            scope=self._scope,
            disk_dir=settings.disk_dir,
            disk_bytes=settings.disk_bytes,
            mooncake_master="" if self._has_lost_pool else settings.mooncake_master or "",
            mooncake_bytes=int(settings.mooncake_size * (1 << 30)),
        )
        wrapper = (sys.executable, "-P", "-m", parent_death.__name__, str(os.getpid()))
        module = "tokenmesh.services.worker_svc.kv.transfer"
        self._starts.append(monotonic_s())
        self._process = await asyncio.create_subprocess_exec(
            *(*wrapper, module, msgspec.json.encode(setup).decode()),
            stdin=PIPE,
            stdout=PIPE,
            env={**sandbox_environment(), **transfer_environment()},
            pass_fds=(arena.file,),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_S):
                report = await self._next(self._process)
        except (asyncio.IncompleteReadError, TimeoutError) as error:
            self.kill()
            await self._reap(self._process)
            raise Unavailable("the transfer process does not start") from error
        if isinstance(report, CannotStart):
            await self._reap(self._process)
            raise ConfigError(report.reason, param=report.param)
        assert isinstance(report, Started)
        self.addresses, self.is_able = report.addresses, True

    async def _next(self, process: Process) -> Report:
        assert process.stdout is not None
        length = await process.stdout.readexactly(LENGTH_BYTES)
        report: Report = decode_report(
            await process.stdout.readexactly(int.from_bytes(length, "little"))
        )
        return report

    async def _watch_forever(self) -> None:
        while True:
            assert self._process is not None
            await self._take_reports(self._process)
            self.kill()
            await self._reap(self._process)
            self._fail_jobs()
            if self._is_stopping:
                return
            logger.warning("the transfer process has ended (%s)", self._process.returncode)
            if not await self._start_again():
                return

    async def _reap(self, process: Process) -> None:
        """Return when the process is gone and its pipes are closed."""
        await self._take_reports(process)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()

    async def _take_reports(self, process: Process) -> None:
        """Until the process ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                report = await self._next(process)
                if isinstance(report, MemoryTaken) and self._mapping is None:
                    # in a thread, behind everything else: copies of steps are faster then
                    mapping = asyncio.to_thread(self._arena.map_pages)
                    self._mapping = asyncio.create_task(mapping)
                if isinstance(report, Served | FoundStored | Ended):
                    job = self._jobs.get(report.job)
                    if job is not None and not job.done():
                        job.set_result(report)

    async def _start_again(self) -> bool:
        """Return whether it runs again."""
        while not self._is_stopping:
            now = monotonic_s()
            if len(self._starts) > _MOST_STARTS and now - self._starts[0] < _WITHIN_S:
                logger.error("the transfer process ends again and again: KV is not exchanged")
                return False
            await asyncio.sleep(min(_LONGEST_PAUSE_S, 0.05 * 2 ** len(self._starts)))
            try:
                await self._start()
            except (ConfigError, Unavailable) as error:
                logger.warning("%s", error.message)
                # a pool that others run must not end what this worker does without it
                self._has_lost_pool |= error.param == MASTER_PARAM
                continue
            if self._is_stopping:
                # `stop` came while it started, and found nothing to end
                self.kill()
            self.num_restarts += 1
            return True
        return False
