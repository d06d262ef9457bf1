"""The arena: host memory for images of blocks, a slot each."""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from tokenmesh.engine.host_memory import available_host_bytes
from tokenmesh.engine.kv.shared_arena import SharedArena
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.kernels import huge_pages
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_PARAM = "worker.kv_offloading_size"


class Arena(NamedTuple):
    images: torch.Tensor | None = None
    """uint8 [slots, image bytes]; None where there is no host tier."""
    shared: SharedArena | None = None
    """The file behind that memory; None where no other process maps it."""


NO_ARENA: Final = Arena()


def make_arena(
    store: KvStore,
    settings: WorkerSettings,
    local_world: int = 1,
    least: Callable[[int], int] = int,
) -> Arena:
    """Memory is taken as slots are first used; ranks of one host share it. Raises ConfigError.

    `least` of all ranks' numbers of slots is that of each.
    """
    num_bytes = settings.host_tier_bytes // local_world
    if not num_bytes:
        if settings.kv.is_used:
            what = "kv.role, kv.disk_dir and kv.mooncake_master need a host tier, "
            what += "and kv_offloading_size is 0"
            raise ConfigError(what, param=_PARAM)
        return NO_ARENA
    if settings.kv.is_used and local_world > 1:
        what = "KV of a model over several ranks is neither exchanged nor kept elsewhere: leave "
        raise ConfigError(
            what + "kv.role, kv.disk_dir and kv.mooncake_master out", param="worker.kv"
        )
    problem = _problem(store, settings)
    if problem is not None:
        # not refused: one setting may be for workers of several models
        logger.warning(
            "no host tier (kv_offloading_size, kv.role, kv.disk_dir, kv.mooncake_master): %s",
            problem,
        )
        return NO_ARENA
    free, asked = available_host_bytes(), settings.host_tier_bytes
    if asked > free:
        raise ConfigError(
            f"kv_offloading_size is {asked / (1 << 30):g} GiB and {free / (1 << 30):.2f} "
            "GiB of host memory are free",
            param=_PARAM,
        )
    if num_bytes < store.image_bytes:
        raise ConfigError(
            f"kv_offloading_size of {num_bytes} bytes holds no block of {store.image_bytes} bytes",
            param=_PARAM,
        )
    shape = least(num_bytes // store.image_bytes), store.image_bytes
    if not settings.kv.is_used:
        return Arena(huge_pages.empty(shape, torch.uint8))
    shared = SharedArena(*shape)
    return Arena(torch.frombuffer(shared.memory, dtype=torch.uint8).view(shape), shared)


def _problem(store: KvStore, settings: WorkerSettings) -> str | None:
    if not settings.enable_prefix_caching:
        return "the prefix cache is off"
    if store.has_states:
        return "the model keeps states in rows, which blocks do not bring back"
    if not store.has_pages:
        return "the model keeps nothing in blocks"
    return None
