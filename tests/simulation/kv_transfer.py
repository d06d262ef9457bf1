"""Stands in for a transfer process: moves numbers between arenas of `KvRunner`s.

It dies, stands still, brings wrong numbers, and reads on from an arena whose lease has ended, as
shared memory and RDMA do.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import xxhash

from tests.fakes.kv_runner import Cells, KvRunner
from tokenmesh.services.worker_svc.kv.leases import ServedLeases
from tokenmesh.services.worker_svc.kv.orders import SUM_BYTES, Ended
from tokenmesh.shared.errors import Unavailable

LONGEST_S = 3.0
"""A job that has not ended then is ended with its process."""
_RESTART_S = 0.2
WRONG = 12345


def sum_of(cells: Cells) -> bytes:
    return xxhash.xxh3_64_digest(repr(cells).encode())


@dataclass
class SimTransfer:
    """Implements what desk and fetcher need of a `TransferProcess`."""

    runner: KvRunner
    size: int
    """Tokens of a block."""
    dice: Random
    all_of_them: dict[bytes, "SimTransfer"]
    """By address, those of dead processes too."""
    wrong: float = 0.0
    """The share of images that come with wrong numbers."""
    slow_s: float = 0.01
    is_able: bool = False
    addresses: Mapping[str, bytes] = field(default_factory=dict)
    num_restarts: int = 0
    pid: int = 1
    leases: ServedLeases = field(default_factory=ServedLeases)
    num_read: int = 0
    _is_frozen: bool = False
    _is_over: bool = False
    _jobs: set["asyncio.Task[Ended]"] = field(default_factory=set)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def cells(self, slot: int) -> Cells:
        return [self.runner.arena.get((slot, at), 0) for at in range(self.size)]

    async def start(self) -> None:
        address = f"{id(self)}-{next(self._numbers)}".encode()
        self.all_of_them[address] = self
        self.leases, self.is_able, self._is_frozen = ServedLeases(), True, False
        self.addresses = {"sim": address}

    async def stop(self) -> None:
        self._is_over = True
        self.kill()

    def freeze(self) -> None:
        """Nothing of it ends any more, until it is killed."""
        self._is_frozen = True

    def kill(self) -> None:
        """End all jobs; it starts again."""
        if not self.is_able:
            return
        self.all_of_them.pop(self.addresses["sim"], None)
        self.is_able, self.addresses = False, {}
        for job in self._jobs:
            job.cancel()
        if not self._is_over:
            asyncio.get_running_loop().call_later(_RESTART_S, self._restart)

    def _restart(self) -> None:
        if not self._is_over:
            self.num_restarts += 1
            asyncio.get_running_loop().create_task(self.start())

    async def serve(self, lease: int, token: bytes, slots: Sequence[int]) -> bytes:
        address = self.addresses.get("sim")
        sums = b"".join(sum_of(self.cells(slot)) for slot in slots)
        self.leases.add(lease, token, slots)
        if not await self._passes(address):
            raise Unavailable("the transfer process has ended")
        return sums

    async def revoke(self, lease: int) -> None:
        self.leases.remove(lease)
        await self._passes(self.addresses.get("sim"))

    async def _passes(self, address: bytes | None) -> bool:
        """Return whether the process that an order went to has answered."""
        await asyncio.sleep(self.dice.random() * self.slow_s)
        if self._is_frozen and self.is_able:
            await asyncio.sleep(LONGEST_S)
            self.kill()
        return address is not None and self.addresses.get("sim") == address

    async def read(
        self,
        addresses: dict[str, bytes],
        lease: int,
        token: bytes,
        remote: Sequence[int],
        slots: Sequence[int],
        sums: bytes,
    ) -> Ended:
        none = [False] * len(slots)
        if not self.is_able:
            return Ended(0, none, reason="process")
        copying = self._copy(addresses.get("sim", b""), lease, token, remote, slots, sums)
        job = asyncio.create_task(copying)
        self._jobs.add(job)
        late = asyncio.get_running_loop().call_later(LONGEST_S, self.kill)
        await asyncio.wait({job})
        late.cancel()
        self._jobs.discard(job)
        return Ended(0, none, reason="process") if job.cancelled() else job.result()

    async def _copy(
        self,
        address: bytes,
        lease: int,
        token: bytes,
        remote: Sequence[int],
        slots: Sequence[int],
        sums: bytes,
    ) -> Ended:
        goods = [False] * len(slots)
        source, asks_once = self.all_of_them.get(address), self.dice.random() < 0.5
        reason = ""
        for number, (there, here) in enumerate(zip(remote, slots, strict=True)):
            await asyncio.sleep(self.dice.random() * self.slow_s)
            while self._is_frozen:  # noqa: ASYNC110 - ended by being killed only
                await asyncio.sleep(LONGEST_S)
            is_allowed = source is not None and source.leases.allows(lease, token, remote)
            is_gone = self.all_of_them.get(address) is None
            if source is None or (is_gone and not asks_once):
                reason = "lost"
                break
            if not is_allowed and (number == 0 or not asks_once):
                reason = "refused"
                break
            expected = sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
            cells = source.cells(there)
            assert not is_allowed or sum_of(cells) == expected, "a lent image has changed"
            if self.dice.random() < self.wrong:
                cells = [WRONG] * self.size
            for at, cell in enumerate(cells):
                self.runner.arena[here, at] = cell
            goods[number] = sum_of(cells) == expected
        self.num_read += sum(goods)
        if not reason and not all(goods):
            reason = "checksum"
        return Ended(0, goods, "sim", 0.001 * len(slots), reason)
