"""The transfer process: moves images between arenas and stores. It knows slots and keys only.

`python -m ...transfer SETUP`, which is `Setup` as JSON; orders come on stdin, reports go to stdout.
It ends with stdin. A read that a system call or a library does not end is ended by ending this
process: then nothing writes to its slots any more.
"""

import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Final

import msgspec

from tokenmesh.engine.kv.shared_arena import POPULATE_WRITE, map_pages
from tokenmesh.services.worker_svc.kv.leases import ServedLeases
from tokenmesh.services.worker_svc.kv.orders import (
    MASTER_PARAM,
    SUM_BYTES,
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
    checksum,
    decode_order,
    framed,
    read_frame,
)
from tokenmesh.services.worker_svc.kv.stores.disk import DiskStore
from tokenmesh.services.worker_svc.kv.stores.mooncake import MooncakeStore
from tokenmesh.services.worker_svc.kv.stores.store import CannotOpen, Store
from tokenmesh.services.worker_svc.kv.transports.mooncake import MooncakeTransport
from tokenmesh.services.worker_svc.kv.transports.nixl import NixlTransport
from tokenmesh.services.worker_svc.kv.transports.shm import ShmTransport
from tokenmesh.services.worker_svc.kv.transports.tcp import TcpTransport
from tokenmesh.services.worker_svc.kv.transports.transport import (
    MappedArena,
    MissingLibrary,
    ReadRefused,
    SlotsAsked,
    Transport,
    Unreachable,
)
from tokenmesh.shared.clock import monotonic_s

logger = logging.getLogger(__name__)

DISK_PARAM: Final = "worker.kv.disk_dir"
LISTEN_PARAM: Final = "worker.kv.listen"
TRANSPORTS_PARAM: Final = "worker.kv.transports"
_THREADS: Final = 4
"""Reads, and sums, at a time."""
_FILLED_BYTES: Final = 16 << 20
"""Memory is taken bit by bit, since the worker may be computing."""


class TransferWork:
    """Carries out orders. Reports are made by any thread."""

    def __init__(self, setup: Setup, report: Callable[[Report], None]) -> None:
        memory = mmap.mmap(setup.file, setup.num_slots * setup.image_bytes)
        view = memoryview(memory)
        self._arena = MappedArena(setup.file, view, setup.num_slots, setup.image_bytes)
        self._leases = ServedLeases()
        self._report = report
        self._setup = setup
        self._memory = memory
        self._transports: dict[str, Transport] = {}
        self._stores: list[Store] = []
        """The first one that has an image brings it."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv")
        self._finders = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv find")

    def open(self) -> CannotStart | None:
        """Open the stores; the reason where one cannot be."""
        setup, arena, scope = self._setup, self._arena, self._setup.scope
        if setup.disk_dir is not None:
            try:
                self._take_store(DiskStore(arena, setup.disk_dir, scope, setup.disk_bytes))
            except CannotOpen as error:
                return CannotStart(f"KV cannot be kept in {setup.disk_dir}: {error}", DISK_PARAM)
        if setup.mooncake_master:
            pool = setup.host, setup.mooncake_master, setup.mooncake_bytes
            try:
                self._take_store(MooncakeStore(arena, scope, *pool))
            except CannotOpen as error:
                return CannotStart(f"KV cannot be kept by Mooncake: {error}", MASTER_PARAM)
            except MissingLibrary as error:
                return CannotStart(f"kv.mooncake_master needs {error}", MASTER_PARAM)
        return None

    def _take_store(self, store: Store) -> None:
        store.open()
        self._stores.append(store)

    def listen(self) -> None:
        """Report the addresses. Raises OSError, MissingLibrary."""
        setup, own = self._setup, (self._arena, self._leases)
        known: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(*own),
            "tcp": lambda: TcpTransport(*own, setup.host, setup.port),
            "nixl": lambda: NixlTransport(*own, setup.host),
            "mooncake": lambda: MooncakeTransport(*own, setup.host),
        }
        self._transports = {name: known[name]() for name in setup.transports}
        self._report(Started({name: each.listen() for name, each in self._transports.items()}))
        threading.Thread(target=self._take_memory, name="kv memory", daemon=True).start()

    def _take_memory(self) -> None:
        """Have the pages of the arena before they are written: in a read that costs three times as
        much as the copy. Nothing is lost where there are none."""
        num_bytes = self._setup.num_slots * self._setup.image_bytes
        try:
            for first in range(0, num_bytes, _FILLED_BYTES):
                os.posix_fallocate(self._setup.file, first, min(_FILLED_BYTES, num_bytes - first))
        except OSError as error:
            logger.warning("memory of the host tier is taken as it is used: %s", error)
            return
        self._report(MemoryTaken())
        map_pages(self._memory, POPULATE_WRITE)

    def take(self, order: Order) -> None:
        if isinstance(order, Revoke):
            self._leases.remove(order.lease)
            self._report(Served(order.job, b""))
        elif isinstance(order, Serve):
            self._leases.add(order.lease, order.token, order.slots)
            self._threads.submit(self._sum, order)
        elif isinstance(order, Find):
            self._finders.submit(self._find, order)
        elif isinstance(order, Get):
            self._threads.submit(self._get, order, monotonic_s() + order.limit_s)
        elif isinstance(order, Put):
            self._threads.submit(self._put, order, monotonic_s() + order.limit_s)
        else:
            self._threads.submit(self._read, order, monotonic_s() + order.limit_s)

    def _find(self, order: Find) -> None:
        count = 0
        for store in self._stores:
            count += store.find(order.keys[count:])
        self._report(FoundStored(order.job, count))

    def _get(self, order: Get, deadline_s: float) -> None:
        began_s, are_good, names = monotonic_s(), [False] * len(order.keys), []
        for store in self._stores:
            missing = [at for at, is_good in enumerate(are_good) if not is_good]
            if not missing:
                break
            keys, slots = [order.keys[at] for at in missing], [order.slots[at] for at in missing]
            for at, is_good in zip(missing, store.get(keys, slots, deadline_s), strict=True):
                are_good[at] = is_good
            names.append(store.name)
        reason = "" if all(are_good) else "missing"
        seconds = monotonic_s() - began_s
        self._report(Ended(order.job, are_good, " ".join(names), seconds, reason))

    def _put(self, order: Put, deadline_s: float) -> None:
        began_s, written = monotonic_s(), 0
        for store in self._stores:
            written += store.put(order.keys, order.slots, deadline_s)
        seconds = monotonic_s() - began_s
        are_good = [True] * len(order.keys)
        self._report(Ended(order.job, are_good, "", seconds, num_written=written))

    def _sum(self, order: Serve) -> None:
        sums = b"".join(checksum(self._arena.image(slot)) for slot in order.slots)
        self._report(Served(order.job, sums))

    def _read(self, order: Read, deadline_s: float) -> None:
        began_s, are_good = monotonic_s(), [False] * len(order.slots)

        def landed(number: int) -> None:
            expected = order.sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]
            are_good[number] = checksum(self._arena.image(order.slots[number])) == expected

        transport, reason = self._try_all(order, deadline_s, landed)
        if not reason and not all(are_good):
            reason = "checksum"
        self._report(Ended(order.job, are_good, transport, monotonic_s() - began_s, reason))

    def _try_all(
        self, order: Read, deadline_s: float, landed: Callable[[int], None]
    ) -> tuple[str, str]:
        """The transport that was used, and why not all came; empty: all did."""
        ask = SlotsAsked(order.lease, order.token, order.remote, self._arena.image_bytes)
        for name, transport in self._transports.items():
            if name not in order.addresses:
                continue
            try:
                transport.read(order.addresses[name], ask, order.slots, deadline_s, landed)
            except Unreachable:
                continue
            except ReadRefused:
                return name, "refused"
            except TimeoutError:
                return name, "timeout"
            # of a source that is gone, whatever it did last; or of a bug, which must end the job
            except Exception:
                return name, "lost"
            return name, ""
        return "", "lost"


def serve(setup: Setup, orders: BinaryIO, reports: BinaryIO) -> int:
    """Until `orders` end; the exit code."""
    lock = threading.Lock()

    def report(message: Report) -> None:
        with lock:
            reports.write(framed(message))
            reports.flush()

    work = TransferWork(setup, report)
    if (problem := work.open()) is not None:
        report(problem)
        return 1
    try:
        work.listen()
    except MissingLibrary as error:
        report(CannotStart(f"kv.transports has {error}", TRANSPORTS_PARAM))
        return 1
    except OSError as error:
        place = f"{setup.host}:{setup.port}"
        report(CannotStart(f"other workers cannot read KV at {place}: {error}", LISTEN_PARAM))
        return 1
    while (frame := read_frame(orders)) is not None:
        work.take(decode_order(frame))
    return 0


def main(argument: str) -> int:
    # Ctrl-C reaches the whole process group; this one leaves when its parent closes stdin
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = msgspec.json.decode(argument, type=Setup)
    # what libraries print must not come between the reports
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return serve(setup, sys.stdin.buffer, reports)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
