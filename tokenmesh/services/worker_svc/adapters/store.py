"""AdapterStore: the adapters that a worker serves by name.

Reading happens in threads, while steps run; nothing here waits for the engine. A stream holds
a lease on the matrices that it began with, whatever becomes of the name.
"""

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tokenmesh.engine.adapters.adapter import (
    AdapterSource,
    ReadAdapter,
    lower_priority,
)
from tokenmesh.services.worker_svc.adapters.directories import AdapterDirectories
from tokenmesh.services.worker_svc.adapters.lease import AdapterLease, AdapterTurn, KnownAdapter
from tokenmesh.services.worker_svc.adapters.memory import AdapterMemory
from tokenmesh.shared.clock import wall_s
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

_MAX_SOURCE: Final = 256
"""Characters: every heartbeat holds them."""


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
        """It holds the version of the latest command about each name, unloaded ones included."""
        self._memory = AdapterMemory(settings, self._is_named)
        self._threads = ThreadPoolExecutor(1, "adapters", lower_priority)
        self._reading: dict[str, asyncio.Future[ReadAdapter]] = {}
        """By path."""
        """Times that matrices were read."""

    @property
    def resolves(self) -> bool:
        """Return whether an unknown name may be found in a directory."""
        return self._settings.lora_dir is not None

    @property
    def num_known(self) -> int:
        return len(self._known)

    @property
    def num_resident(self) -> int:
        """Adapters whose matrices are in memory."""
        return self._memory.num_resident

    @property
    def max_active(self) -> int:
        """Most that streams may use at a time."""
        return self._settings.max_loras

    @property
    def num_active(self) -> int:
        """Those of them that streams use."""
        return self._memory.num_active

    @property
    def num_waiting(self) -> int:
        """Streams that wait for room."""
        return self._memory.num_waiting

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
                is_in_memory=self._memory.holds(each.content_hash),
                source=each.source if len(each.source) <= _MAX_SOURCE else "",
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
        """Return the version of the latest command about a name; -1: there was none."""
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
            before.source = path or str(directory)
            self._note_version(name, before.version)
            return before, True
        if before is not None and not in_place:
            raise Conflict(
                f"The lora adapter {name!r} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            )
        self._check_room(name)
        source = path or str(directory)
        known = KnownAdapter(name, directory, read.content_hash, wall_s(), version, source)
        self._known[name] = known
        self._note_version(name, version)
        self._memory.keep(read)
        logger.info("adapter %s: rank %d, read from %s", name, read.rank, directory)
        return known, False

    def unload(self, name: str, version: int = 0) -> bool:
        """Take no more streams for it; False if there was none."""
        known = self._known.pop(name, None)
        self._note_version(name, version)
        if known is None:
            return False
        self._memory.drop_unused(known.content_hash)
        logger.info("adapter %s: unloaded", name)
        return True

    def lease_now(self, known: Adapter) -> AdapterLease | None:
        """Matrices that are in memory, if the stream need not wait for them."""
        return self._memory.lease_now(known.content_hash)

    async def lease(self, wanted: Adapter, turn: AdapterTurn | None = None) -> AdapterLease:
        """Matrices of an adapter, read again if they are not in memory.

        Waits while streams of `max_loras` others run; in order, so that none waits forever. Raises
        Overloaded after `load_timeout_s`, Unavailable when the name has another content now, and
        Cancelled when the stream gives up its turn.
        """

        async def read() -> ReadAdapter:
            known = self.find(wanted.name, wanted.content_hash)
            read = await self._read(known.path)
            if read.content_hash != wanted.content_hash:
                raise Unavailable(f"the files of the adapter {wanted.name!r} have changed")
            return read

        return await self._memory.lease(wanted.content_hash, read, turn or AdapterTurn())

    def _is_named(self, content_hash: str) -> bool:
        return any(each.content_hash == content_hash for each in self._known.values())

    async def _read(self, directory: Path) -> ReadAdapter:
        """One read of a directory at a time; its deadline is `load_timeout_s`."""
        task = self._reading.get(str(directory))
        if task is None:
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self._threads, self._source.read, directory)
            self._reading[str(directory)] = task
            task.add_done_callback(lambda _: self._reading.pop(str(directory), None))
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            limit_s = self._settings.load_timeout_s
            logger.warning("%s: not read within %g s", directory, limit_s)
            raise Unavailable(f"the adapter was not read within {limit_s:g} s") from error
        except InvalidInput as error:
            # any client may name an adapter: the path is for the operator
            logger.warning("%s cannot be served: %s", directory, error.message)
            raise

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
    """Return what a request names. Raises InvalidInput, and what `AdapterStore.find` does."""
    if message.lora is None:
        return None
    if store is None:
        raise InvalidInput("this worker serves no adapters: --enable-lora is off", param="lora")
    return store.find(message.lora, message.lora_hash).adapter
