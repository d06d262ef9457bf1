"""The prefix cache that settings and a runner call for."""

import logging

from tokenmesh.engine.kv.block_log import BlockLog
from tokenmesh.engine.kv.block_pool import (
    KvGroups,
)
from tokenmesh.engine.kv.prefix_cache import PrefixCache
from tokenmesh.engine.kv.saved_states import SavedStates, StateBorders
from tokenmesh.engine.runner import Runner
from tokenmesh.shared.config.worker import WorkerSettings

logger = logging.getLogger(__name__)


def has_prefix_cache(settings: WorkerSettings, runner: Runner) -> bool:
    """Return whether equal beginnings of prompts are computed once."""
    can_share = runner.num_saved_states > 0 if runner.has_states else runner.has_pages
    return settings.enable_prefix_caching and can_share


def make_cache(
    settings: WorkerSettings, runner: Runner, route_tokens: int, log: BlockLog | None
) -> PrefixCache:
    """The prefix cache and its pool. It is off where rows keep states and none can be saved, and
    not indexed where a route block is not a whole number of blocks."""
    size, num_slots = settings.block_size, runner.num_saved_states
    enabled = has_prefix_cache(settings, runner)
    if settings.enable_prefix_caching and runner.has_states and not enabled:
        logger.info("no prefix cache: the model keeps states, and this worker cannot save any")
    states = None
    if enabled and runner.has_states:
        borders = StateBorders.of(settings.mamba_block_size, size, num_slots)
        states = SavedStates(num_slots, borders, needs_blocks=runner.has_pages)
    groups = KvGroups.of(runner.windows, size, settings.max_num_batched_tokens)
    indexed = route_tokens if route_tokens % size == 0 else 0
    if enabled and route_tokens and not indexed:
        logger.warning(
            "the mesh cannot know which prompts are cached here: a route block of %d tokens "
            "(tokenizer.route_block_tokens) is not a whole number of blocks of %d",
            *(route_tokens, size),
        )
    return PrefixCache(
        *(runner.num_blocks, groups),
        enabled=enabled,
        route_tokens=indexed,
        log=log,
        states=states,
        kv_code=settings.kv_code,
        images=runner.images,
        has_store=settings.kv.has_stores,
    )
