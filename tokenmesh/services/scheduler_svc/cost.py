"""What a worker costs a request: the estimated time to its first token.

Each worker measures and publishes its own rates, so a slow one prices itself out.
"""

from tokenmesh.shared.config.placement import SchedulerSettings
from tokenmesh.shared.messages.beat import WorkerLoad

_MAX_KV_USAGE = 0.999  # keeps k/(1-k) finite when the pool is full


def kv_usage(load: WorkerLoad) -> float:
    """Share of the worker's KV blocks in use, in [0, 1]."""
    return min(1.0, max(0.0, load.kv_blocks_used / max(1, load.kv_blocks_total)))


def estimated_ttft_s(
    load: WorkerLoad,
    settings: SchedulerSettings,
    *,
    uncached_tokens: int,
    reserved_tokens: int,
) -> float:
    """Seconds until the first token of a request that needs `uncached_tokens` of prefill.

    `reserved_tokens` are those placed on the worker that its last beat cannot know of yet.
    """
    rate = load.prefill_tokens_per_s or settings.assumed_prefill_tokens_per_s
    ahead = load.queued_tokens + reserved_tokens
    return (ahead + uncached_tokens) / rate + extra_s(load, settings)


def extra_s(load: WorkerLoad, settings: SchedulerSettings) -> float:
    """Seconds that come on top of prefill: what a full KV pool costs, and the step to wait for."""
    usage = min(kv_usage(load), _MAX_KV_USAGE)
    return settings.kv_pressure_s * usage / (1.0 - usage) + load.step_s


def capacity(load: WorkerLoad, settings: SchedulerSettings) -> int:
    """Streams the worker may hold, running and waiting, before requests queue here instead."""
    slack = int(load.max_num_seqs * settings.worker_queue_share)
    return load.max_num_seqs + slack
