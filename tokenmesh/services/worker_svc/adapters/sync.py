"""AdapterSync: gives this worker the adapters that the other workers of its model have."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tokenmesh.services.worker_svc.adapters.store import AdapterStore
from tokenmesh.shared.adapter_registry import AdapterRecord, AdapterRegistry
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import TokenMeshError

logger = logging.getLogger(__name__)


class AdapterSync:
    """Follows the registry; without Redis the worker keeps what it has."""

    def __init__(
        self,
        store: AdapterStore,
        registry: AdapterRegistry,
        settings: LoraSettings,
        on_change: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """on_change: publishes what the worker has now."""
        self._store = store
        self._registry = registry
        self._settings = settings
        self._on_change = on_change
        self._failed: dict[str, int] = {}
        """Versions that could not be loaded here."""

    async def run(self) -> None:
        is_lost = False
        while True:
            try:
                await self.follow()
                is_lost = False
            except TokenMeshError as error:
                if not is_lost:
                    logger.warning("cannot read the registry of adapters: %s", error.message)
                is_lost = True
            await asyncio.sleep(self._settings.sync_interval_s)

    async def follow(self) -> None:
        """Carry out commands that other workers got, and write what the registry has lost."""
        records = await self._registry.read()
        has_changed = False
        for name, record in records.items():
            if record.version > self._store.version_of(name):
                has_changed |= await self._apply(name, record)
        if has_changed:
            await self._on_change()
        await self._write_missing(records)
        await self._registry.prune(records)

    async def _apply(self, name: str, record: AdapterRecord) -> bool:
        if record.is_unloaded:
            return self._store.unload(name, record.version)
        if self._failed.get(name) == record.version:
            return False
        try:
            known, _ = await self._store.load(
                name, record.path, in_place=True, version=record.version
            )
        except TokenMeshError as error:
            if not error.retryable:
                self._failed[name] = record.version
            logger.error("adapter %s cannot be loaded here: %s", name, error.message)
            return False
        if known.content_hash != record.content_hash:
            self._failed[name] = record.version
            self._store.unload(name, record.version)
            logger.error("adapter %s: %s has another content here", name, record.path)
        return True

    async def _write_missing(self, records: Mapping[str, AdapterRecord]) -> None:
        for known in self._store.known:
            if known.version > 0 and known.name not in records:
                record = AdapterRecord(
                    version=known.version, path=str(known.path), content_hash=known.content_hash
                )
                await self._registry.write(known.name, record)
