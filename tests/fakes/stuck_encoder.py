"""An encoder in a separate process whose tower never ends its first batch; a test may kill it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from typing import Any, Final, cast

from tests.fakes.service_mesh import running
from tokenmesh.services.mm_encoder_svc.actor import EncoderActor
from tokenmesh.services.mm_encoder_svc.batcher import Batcher, Features
from tokenmesh.services.mm_encoder_svc.embeddings import EmbeddingCache, Embeddings
from tokenmesh.shared import subjects
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages.media import IMAGE
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.tensor_blob import TensorBlob

_START_S: Final = 60.0
"""A busy machine takes long to import everything."""
_FORKS = get_context("forkserver")


class StuckEncoder:
    """Use `stuck_encoder`."""

    def __init__(self, process: ForkServerProcess, is_encoding: Event) -> None:
        self._process = process
        self._is_encoding = is_encoding

    @property
    def is_encoding(self) -> bool:
        """True once its tower has begun a batch."""
        return self._is_encoding.is_set()

    async def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        await asyncio.to_thread(self._process.join)


@asynccontextmanager
async def stuck_encoder(settings: Settings, model: ModelName) -> AsyncIterator[StuckEncoder]:
    """One more encoder of a model of images. It is part of the mesh inside the block."""
    is_ready, is_encoding = _FORKS.Event(), _FORKS.Event()
    arguments = (settings, model, is_ready, is_encoding)
    process = _FORKS.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    encoder = StuckEncoder(process, is_encoding)
    try:
        assert await asyncio.to_thread(is_ready.wait, _START_S), "the encoder did not start"
        yield encoder
    finally:
        await encoder.kill()


class _StuckTower:
    """The part of a tower that `Embeddings` uses."""

    kinds = frozenset({IMAGE})
    encoder_states = 0
    fingerprint = "stuck"

    def __init__(self, is_encoding: Event) -> None:
        self._is_encoding = is_encoding

    def check(self, features: Features) -> None:
        """It takes everything."""

    def encode(self, batch: list[Features]) -> list[TensorBlob]:
        self._is_encoding.set()
        while True:
            time.sleep(1)


def _serve(settings: Settings, model: ModelName, is_ready: Event, is_encoding: Event) -> None:
    async def build(mesh: Mesh) -> None:
        limits, tower = mesh.settings.encoder, _StuckTower(is_encoding)
        batcher = Batcher(tower.encode, limits)
        cache = EmbeddingCache(limits.cache_bytes)
        embeddings = Embeddings(cast("Any", tower), batcher, cache, mesh.blobs, limits.blob_ttl_s)
        actor = EncoderActor(
            {model: embeddings},
            [batcher],
            limits.max_items,
            metrics=mesh.metrics,
            instance_id=mesh.instance_id,
        )
        subject = subjects.encode(model)
        await mesh.listen(actor, subjects.replica(subject, mesh.instance_id))
        await mesh.listen(actor, subject, queue=mesh.service)

    async def serve() -> None:
        async with running("encoder", settings, build) as mesh:
            await mesh.bus.flush()
            is_ready.set()
            await asyncio.Event().wait()

    asyncio.run(serve())
