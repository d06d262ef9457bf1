"""AdapterStore: the adapters that a worker serves by name, and those whose matrices are in memory.

Reading happens in threads, beside running steps; nothing here waits for the engine. A stream holds
a lease on the matrices that it began with, whatever becomes of the name.
"""

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenmesh.services.worker_svc.adapters.adapter import (
    AdapterSource,
    ReadAdapter,
    lower_priority,
)
from tokenmesh.services.worker_svc.adapters.directories import AdapterDirectories
from tokenmesh.services.worker_svc.adapters.lease import (
    AdapterLease,
    KnownAdapter,
    ResidentAdapter,
)
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import (
    ConfigError,
    Conflict,
    InvalidInput,
    NotFound,
    Overloaded,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.messages.adapters import AdapterCard
from tokenmesh.shared.messages.generate import Generate
from tokenmesh.shared.messages.pooling import Pool

logger = logging.getLogger(__name__)


class AdapterStore:
    """Used by the event loop only."""

    def __init__(
        self, settings: LoraSettings, source: AdapterSource, directories: AdapterDirectories
    ) -> None:
        self._settings = settings
        self._source = source
        self._directories = directories
        self._known: dict[str, KnownAdapter] = {}
        self._versions: OrderedDict[str, int] = OrderedDict()
        """Of the latest command about each name, unloaded ones included."""
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()
        """Least recently used first."""
        self._waiting: OrderedDict[object, asyncio.Future[None]] = OrderedDict()
        """Streams that wait for room, in their order."""
        self._threads = ThreadPoolExecutor(1, "adapters", lower_priority)
        self._reading: dict[str, asyncio.Future[ReadAdapter]] = {}
        """By path."""
        self.num_loads = 0
        """Times that matrices were read."""

    @property
    def resolves(self) -> bool:
        """Whether an unknown name may be found in a directory."""
        return self._settings.lora_dir is not None

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def num_resident(self) -> int:
        """Adapters whose matrices are in memory."""
        return len(self._resident)

    @property
    def max_active(self) -> int:
        """Most that streams may use at a time."""
        return self._settings.max_loras

    @property
    def num_active(self) -> int:
        """Those of them that streams use."""
        return sum(each.num_leases > 0 for each in self._resident.values())

    @property
    def num_waiting(self) -> int:
        """Streams that wait for room."""
        return len(self._waiting)

    @property
    def known(self) -> list[KnownAdapter]:
        """All of them, by name."""
        return [self._known[name] for name in sorted(self._known)]

    def cards(self) -> list[AdapterCard]:
        """For a heartbeat, by name."""
        return [
            AdapterCard(
                name=each.name,
                content_hash=each.content_hash,
                created_s=each.created_s,
                is_in_memory=each.content_hash in self._resident,
            )
            for each in self.known
        ]

    def find(self, name: str, content_hash: str = "") -> KnownAdapter:
        """Raises NotFound; Unavailable when the name stands for another content here."""
        known = self._known.get(name)
        if known is None:
            raise NotFound(f"this worker has no adapter {name!r}", param="lora")
        if content_hash not in ("", known.content_hash):
            raise Unavailable(f"the adapter {name!r} has another content on this worker")
        return known

    def version_of(self, name: str) -> int:
        """Of the latest command about a name; -1: there was none."""
        return self._versions.get(name, -1)

    async def load_modules(self) -> None:
        """Those of the settings. Raises ConfigError for one that cannot be served."""
        for name, path in self._settings.lora_modules.items():
            try:
                await self.load(name, path)
            except TokenMeshError as error:
                what = f"the adapter {name} cannot be served: {error.message}"
                raise ConfigError(what, param="worker.lora.lora_modules") from error

    async def load(
        self, name: str, path: str, *, in_place: bool = False, version: int = 0
    ) -> tuple[KnownAdapter, bool]:
        """Serve an adapter; whether this very one was there already.

        Raises InvalidInput for what cannot be served, Conflict for a name that is taken.
        """
        directory = await asyncio.to_thread(self._directories.locate, name, path)
        self._check_room(name)
        read = await self._read(directory)
        if 0 < version < self.version_of(name):
            raise Conflict(f"a later command about the adapter {name!r} came in", param="lora_name")
        before = self._known.get(name)
        if before is not None and before.content_hash == read.content_hash:
            before.path, before.version = directory, max(before.version, version)
            self._note_version(name, before.version)
            return before, True
        if before is not None and not in_place:
            raise Conflict(
                f"The lora adapter {name!r} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        self._check_room(name)
        known = KnownAdapter(name, directory, read.content_hash, wall_s(), version)
        self._known[name] = known
        self._note_version(name, version)
        self._keep(read)
        logger.info("adapter %s: rank %d, read from %s", name, read.rank, directory)
        return known, False

    def unload(self, name: str, version: int = 0) -> bool:
        """Take no more streams for it; False if there was none."""
        known = self._known.pop(name, None)
        self._note_version(name, version)
        if known is None:
            return False
        self._drop_unused(known.content_hash)
        logger.info("adapter %s: unloaded", name)
        return True

    def lease_now(self, known: Adapter) -> AdapterLease | None:
        """Matrices that are in memory, if the stream need not wait for them."""
        resident = self._resident.get(known.content_hash)
        if resident is None or self._waiting:
            return None
        if not resident.num_leases and self.num_active >= self._settings.max_loras:
            return None
        return self._lease(resident)

    async def lease(self, wanted: Adapter) -> AdapterLease:
        """Matrices of an adapter, read again if they are not in memory.

        Waits while streams of `max_loras` others run; in order, so that none waits forever. Raises
        Overloaded after `load_timeout_s`, and Unavailable when the name has another content now.
        """
        if (lease := self.lease_now(wanted)) is not None:
            return lease
        until_s = monotonic_s() + self._settings.load_timeout_s
        ticket = object()
        try:
            while not self._may_go(ticket, wanted.content_hash):
                await self._wait(ticket, until_s)
            # until the lease is taken no one behind it may take the room
            resident = self._resident.get(wanted.content_hash)
            if resident is None:
                known = self.find(wanted.name, wanted.content_hash)
                read = await self._read(known.path)
                if read.content_hash != wanted.content_hash:
                    raise Unavailable(f"the files of the adapter {wanted.name!r} have changed")
                resident = self._keep(read)
            return self._lease(resident)
        finally:
            self._waiting.pop(ticket, None)
            self._wake()

    def _may_go(self, ticket: object, content_hash: str) -> bool:
        self._waiting.setdefault(ticket, asyncio.get_running_loop().create_future())
        if next(iter(self._waiting)) is not ticket:
            return False
        resident = self._resident.get(content_hash)
        is_active = resident is not None and resident.num_leases > 0
        return is_active or self.num_active < self._settings.max_loras

    async def _wait(self, ticket: object, until_s: float) -> None:
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(max(0.0, until_s - monotonic_s())):
                await turn
        except TimeoutError as error:
            what = f"streams of {self._settings.max_loras} other adapters are running"
            raise Overloaded(f"{what}: no room for this one", retry_after_s=1.0) from error

    def _wake(self) -> None:
        """Let the first that waits look again."""
        if self._waiting:
            turn = next(iter(self._waiting.values()))
            if not turn.done():
                turn.set_result(None)

    def _lease(self, resident: ResidentAdapter) -> AdapterLease:
        resident.num_leases += 1
        self._resident.move_to_end(resident.adapter.content_hash)
        return AdapterLease(resident.adapter, self._released)

    def _released(self, content_hash: str) -> None:
        self._resident[content_hash].num_leases -= 1
        self._drop_unused(content_hash)
        self._trim()
        self._wake()

    def _keep(self, read: ReadAdapter) -> ResidentAdapter:
        """Have matrices in memory; the least recently used ones without streams make room."""
        resident = self._resident.setdefault(read.content_hash, ResidentAdapter(read))
        self._resident.move_to_end(read.content_hash)
        self._trim()
        return resident

    def _trim(self) -> None:
        surplus = len(self._resident) - self._settings.num_in_memory
        unused = [each for each, held in self._resident.items() if not held.num_leases]
        # the latest one was read for a stream that has no lease yet
        for content_hash in unused[: max(0, min(surplus, len(unused) - 1))]:
            del self._resident[content_hash]

    def _drop_unused(self, content_hash: str) -> None:
        """Forget matrices that neither a name nor a stream needs."""
        resident = self._resident.get(content_hash)
        is_named = any(each.content_hash == content_hash for each in self._known.values())
        if resident is not None and not resident.num_leases and not is_named:
            del self._resident[content_hash]

    async def _read(self, directory: Path) -> ReadAdapter:
        """One read of a directory at a time; its deadline is `load_timeout_s`."""
        task = self._reading.get(str(directory))
        if task is None:
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._threads, self._source.read, directory)
            self._reading[str(directory)] = task
            task.add_done_callback(lambda _: self._reading.pop(str(directory), None))
            self.num_loads += 1
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            limit_s = self._settings.load_timeout_s
            raise Unavailable(f"{directory}: not read within {limit_s:g} s") from error

    def _check_room(self, name: str) -> None:
        limit = self._settings.max_adapters
        if name not in self._known and len(self._known) >= limit:
            raise Overloaded(f"this worker has {limit} adapters; unload one of them")

    def _note_version(self, name: str, version: int) -> None:
        self._versions[name] = max(version, self._versions.get(name, -1))
        self._versions.move_to_end(name)
        while len(self._versions) > 4 * self._settings.max_adapters:
            self._versions.popitem(last=False)


def adapter_of(store: AdapterStore | None, message: Generate | Pool) -> Adapter | None:
    """What a request names. Raises InvalidInput, and what `AdapterStore.find` does."""
    if message.lora is None:
        return None
    if store is None:
        raise InvalidInput("this worker serves no adapters: --enable-lora is off", param="lora")
    return store.find(message.lora, message.lora_hash).adapter
