"""AdaptersActor: commands of the mesh about adapters; keeps to what the other workers have."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from tokenmesh.services.worker_svc.adapters.store import AdapterStore
from tokenmesh.services.worker_svc.adapters.sync import AdapterSync
from tokenmesh.shared.actor import Actor, Context, handles
from tokenmesh.shared.messages.adapters import (
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from tokenmesh.shared.metrics import Metrics


class AdaptersActor(Actor):
    """Answers once a heartbeat has been published that shows what a command did."""

    def __init__(
        self,
        store: AdapterStore,
        sync: AdapterSync,
        beat: Callable[[], Coroutine[Any, Any, None]],
        metrics: Metrics,
        labels: Mapping[str, str],
    ) -> None:
        """labels: of the worker's metrics."""
        super().__init__()
        self._store = store
        self._sync = sync
        self._beat = beat
        metrics.gauge_of("lora_adapters", lambda: store.num_known, **labels)
        metrics.gauge_of("lora_adapters_in_memory", lambda: store.num_resident, **labels)
        metrics.gauge_of("lora_adapters_active", lambda: store.num_active, **labels)
        metrics.gauge_of("lora_streams_waiting", lambda: store.num_waiting, **labels)
        metrics.gauge_of("lora_max_adapters", lambda: store.max_active, **labels)

    async def start(self) -> None:
        self.spawn(self._sync.run, "adapters")

    @handles(LoadAdapter)
    async def load(self, message: LoadAdapter, context: Context) -> AdapterLoaded:
        """Read an adapter while steps run. Raises InvalidInput for one that is not served."""
        known, was_there = await self._store.load(
            message.name, message.path, in_place=message.in_place, version=message.version
        )
        await self._beat()
        card = next(each for each in self._store.cards() if each.name == known.name)
        return AdapterLoaded(card=card, path=str(known.path), was_there=was_there)

    @handles(UnloadAdapter)
    async def unload(self, message: UnloadAdapter, context: Context) -> AdapterUnloaded:
        """Take no more streams for an adapter."""
        was_there = self._store.unload(message.name, message.version)
        await self._beat()
        return AdapterUnloaded(was_there=was_there)
