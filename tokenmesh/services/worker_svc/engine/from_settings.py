"""What the engine's parts are made of, worked out from the settings."""

from collections.abc import Sequence

from tokenmesh.services.worker_svc.engine.block_log import BlockLog
from tokenmesh.services.worker_svc.engine.block_pool import BlockPool
from tokenmesh.services.worker_svc.engine.kv_groups import KvGroups
from tokenmesh.services.worker_svc.engine.limits import Limits
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.route_ledger import RouteLedger
from tokenmesh.services.worker_svc.engine.runner import Runner
from tokenmesh.shared.config.worker import WorkerSettings


def make_cache(
    pool: BlockPool,
    settings: WorkerSettings,
    runner: Runner,
    route_tokens: int,
    log: BlockLog | None,
) -> PrefixCache:
    """The prefix cache; blocks that do not fill a route block exactly are not for the index.

    It is off for a model whose rows keep states: a shared block does not bring them.
    """
    size = settings.block_size
    is_indexed = route_tokens and route_tokens % size == 0
    routes = RouteLedger(pool, size, route_tokens) if is_indexed else None
    enabled = settings.enable_prefix_caching and not runner.has_states
    groups = groups_of(settings, runner.windows)
    return PrefixCache(pool, groups, enabled=enabled, routes=routes, log=log)


def groups_of(settings: WorkerSettings, windows: Sequence[int | None]) -> KvGroups:
    """The groups of a runner with those windows."""
    return KvGroups.of(windows, settings.block_size, settings.max_num_batched_tokens)


def limits_of(settings: WorkerSettings, num_blocks: int) -> Limits:
    """The scheduler's limits for a pool of that size."""
    return Limits(
        num_rows=settings.num_rows,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        block_size=settings.block_size,
        watermark_blocks=int(settings.kv_watermark * num_blocks),
    )
