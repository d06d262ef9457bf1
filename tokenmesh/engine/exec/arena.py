"""The arena: host memory for images of blocks, a slot each."""

import logging

import torch

from tokenmesh.engine.host_memory import available_host_bytes
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.kernels import huge_pages
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_PARAM = "worker.kv_offloading_size"


def make_arena(store: KvStore, settings: WorkerSettings) -> torch.Tensor | None:
    """uint8 [slots, image bytes]; None where there is no host tier. Memory is taken as slots are
    first used. Raises ConfigError."""
    num_bytes = settings.host_tier_bytes
    if not num_bytes:
        return None
    problem = _problem(store, settings)
    if problem is not None:
        # not refused: one setting may be for workers of several models
        logger.warning("no host tier (kv_offloading_size): %s", problem)
        return None
    free = available_host_bytes()
    if num_bytes > free:
        raise ConfigError(
            f"kv_offloading_size is {settings.kv_offloading_size:g} GiB and {free / (1 << 30):.2f} "
            "GiB of host memory are free",
            param=_PARAM,
        )
    if num_bytes < store.image_bytes:
        raise ConfigError(
            f"kv_offloading_size of {num_bytes} bytes holds no block of {store.image_bytes} bytes",
            param=_PARAM,
        )
    return huge_pages.empty((num_bytes // store.image_bytes, store.image_bytes), torch.uint8)


def _problem(store: KvStore, settings: WorkerSettings) -> str | None:
    if not settings.enable_prefix_caching:
        return "the prefix cache is off"
    if store.has_states:
        return "the model keeps states in rows, which blocks do not bring back"
    if not store.has_pages:
        return "the model keeps nothing in blocks"
    return None
