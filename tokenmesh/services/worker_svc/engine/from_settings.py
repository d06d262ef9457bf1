"""What the engine's parts are made of, worked out from the settings."""

import logging
from collections.abc import Sequence

from tokenmesh.services.worker_svc.engine.block_log import BlockLog
from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.kv_groups import KvGroups
from tokenmesh.services.worker_svc.engine.limits import EngineLimits
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.route_ledger import RouteLedger
from tokenmesh.services.worker_svc.engine.runner import Runner
from tokenmesh.services.worker_svc.engine.saved_states import SavedStates
from tokenmesh.services.worker_svc.engine.state_borders import StateBorders
from tokenmesh.shared.config.worker import WorkerSettings

logger = logging.getLogger(__name__)


def make_cache(
    pool: BlockPool,
    settings: WorkerSettings,
    runner: Runner,
    route_tokens: int,
    log: BlockLog | None,
) -> PrefixCache:
    """The prefix cache; blocks that do not fill a route block exactly are not for the index.

    It is off for a model whose rows keep states where none can be saved: a shared block does not
    bring them.
    """
    size = settings.block_size
    enabled = has_prefix_cache(settings, runner)
    if settings.enable_prefix_caching and not enabled:
        logger.info("no prefix cache: the model keeps states, and this worker cannot save any")
    states = _states_of(settings, runner) if enabled and runner.has_states else None
    is_indexed = route_tokens and route_tokens % size == 0
    is_there = pool.find if states is None else states.reaches
    routes = RouteLedger(is_there, size, route_tokens) if is_indexed else None
    groups = groups_of(settings, runner.windows)
    return PrefixCache(pool, groups, enabled=enabled, routes=routes, log=log, states=states)


def has_prefix_cache(settings: WorkerSettings, runner: Runner) -> bool:
    """Whether equal beginnings of prompts are computed once."""
    can_share = not runner.has_states or runner.num_saved_states > 0
    return settings.enable_prefix_caching and can_share


def _states_of(settings: WorkerSettings, runner: Runner) -> SavedStates:
    num_slots = runner.num_saved_states
    borders = StateBorders.of(settings.mamba_block_size, settings.block_size, num_slots)
    return SavedStates(num_slots, borders, needs_blocks=runner.has_pages)


def groups_of(settings: WorkerSettings, windows: Sequence[int | None]) -> KvGroups:
    """The groups of a runner with those windows."""
    return KvGroups.of(windows, settings.block_size, settings.max_num_batched_tokens)


def limits_of(settings: WorkerSettings, num_blocks: int) -> EngineLimits:
    """The scheduler's limits for a pool of that size."""
    return EngineLimits(
        num_rows=settings.num_rows,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        block_size=settings.block_size,
        watermark_blocks=int(settings.kv_watermark * num_blocks),
    )
