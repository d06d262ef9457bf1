"""Process entry of mm_encoder_svc."""

import asyncio
import logging

import torch

from tokenmesh.services.mm_encoder_svc.actor import EncoderActor
from tokenmesh.services.mm_encoder_svc.batcher import Batcher
from tokenmesh.services.mm_encoder_svc.cache import EmbeddingCache
from tokenmesh.services.mm_encoder_svc.embeddings import Embeddings
from tokenmesh.services.mm_encoder_svc.loader import load_tower
from tokenmesh.shared import subjects
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.encoder import EncoderSettings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.service import Mesh, run_service

logger = logging.getLogger(__name__)


async def build(mesh: Mesh) -> None:
    """Load the tower of every model that has one. A mesh of text models leaves nothing to do."""
    limits = mesh.settings.encoder
    if limits.threads is not None:
        torch.set_num_threads(limits.threads)
    device = _device(limits)
    cache = EmbeddingCache(limits.cache_bytes)
    models: dict[ModelName, Embeddings] = {}
    batchers: list[Batcher] = []
    for settings in mesh.settings.models:
        tower = await asyncio.to_thread(load_tower, settings, device)
        if tower is None:
            logger.info("%s takes no images", settings.name)
            continue
        batcher = Batcher(tower.encode, limits)
        batchers.append(batcher)
        embeddings = Embeddings(tower, batcher, cache, mesh.blobs, limits.blob_ttl_s)
        for name in settings.served_model_name or (settings.name,):
            models[ModelName(name)] = embeddings
    actor = EncoderActor(
        models,
        batchers,
        limits.max_items,
        metrics=mesh.metrics,
        instance_id=mesh.instance_id,
    )
    for model in models:
        await mesh.listen(actor, subjects.encode(model), queue=subjects.ENCODER_QUEUE)


def run(settings: Settings) -> int:
    """Run until a signal; the exit code."""
    return run_service("encoder", settings, build)


def _device(limits: EncoderSettings) -> torch.device:
    if limits.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(limits.device)
