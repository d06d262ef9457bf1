"""Process entry of mm_encoder_svc."""

import asyncio
import logging
from typing import TYPE_CHECKING

from tokenmesh.services.mm_encoder_svc.actor import EncoderActor
from tokenmesh.services.mm_encoder_svc.batcher import Batcher
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.mm_encoder_svc.embeddings import EmbeddingCache, Embeddings
from tokenmesh.shared import subjects
from tokenmesh.shared.allocator import give_back_after_loading
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.lean_import import import_model_classes
from tokenmesh.shared.service import Mesh, run_service

if TYPE_CHECKING:
    from tokenmesh.services.mm_encoder_svc.tower import Tower

logger = logging.getLogger(__name__)


async def build(mesh: Mesh) -> None:
    """Load the tower of every model that has one, and listen for Encode of these models."""
    limits = mesh.settings.encoder
    cache = EmbeddingCache(limits.cache_bytes)
    mesh.metrics.gauge_of("mm_cache_bytes", lambda: cache.num_bytes, engine=mesh.instance_id)
    models: dict[ModelName, Embeddings] = {}
    batchers: list[Batcher] = []
    for settings in mesh.settings.models:
        # 0 from the beginning, also of a model without a tower, as vLLM has them.
        for name in ("mm_cache_queries", "mm_cache_hits"):
            mesh.metrics.counter(name, model_name=settings.name, engine=mesh.instance_id)
        try:
            tower = await asyncio.to_thread(_load, settings, limits)
        except (CheckpointError, ConfigError) as error:
            if not mesh.settings.service.skip_broken_models:
                raise
            logger.error("%s is not served: %s", settings.name, error)
            mesh.note_broken(_names(settings), error)
            continue
        if tower is None:
            logger.info("%s accepts text only", settings.name)
            continue
        batcher = Batcher(tower.encode, limits)
        batchers.append(batcher)
        embeddings = Embeddings(tower, batcher, cache, mesh.blobs, limits.blob_ttl_s)
        models.update(dict.fromkeys(_names(settings), embeddings))
    if models:
        await asyncio.to_thread(give_back_after_loading)
    actor = EncoderActor(
        models,
        batchers,
        limits.max_items,
        metrics=mesh.metrics,
        instance_id=mesh.instance_id,
    )
    for model in models:
        subject = subjects.encode(model)
        await mesh.listen(actor, subjects.replica(subject, mesh.instance_id))
        await mesh.listen(actor, subject, queue=mesh.service)


def run(settings: Settings) -> int:
    """Run until a signal; returns the exit code."""
    return run_service("encoder", settings, build)


def _names(settings: ModelSettings) -> list[ModelName]:
    return [ModelName(name) for name in settings.served_model_name or (settings.name,)]


def _load(settings: ModelSettings, limits: EncoderSettings) -> "Tower | None":
    if settings.language_model_only:
        return None
    found = find_tower(settings.model, settings.revision, settings.hf_overrides)
    if found is None:
        return None
    # Importing torch takes seconds and 200 MB, which a mesh of text models does not need.
    # before the tower names a class of transformers
    import_model_classes()
    from tokenmesh.services.mm_encoder_svc.tower import load_tower

    return load_tower(found, settings.dtype, limits)
