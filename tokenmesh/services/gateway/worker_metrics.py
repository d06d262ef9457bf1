"""WorkerMetrics: the load of the workers as their beats tell it, in a gateway's /metrics.

Read at each scrape, so that a worker that is gone is gone from here too. Each worker's own
endpoint has more; this is for those who scrape gateways only.
"""

from collections.abc import Callable, Iterator
from typing import Final

from tokenmesh.shared.membership import Member
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.metrics import Metrics, Sample

_READ_BY_NAME: Final[dict[str, Callable[[WorkerLoad], float]]] = {
    "worker_requests_running": lambda load: load.running,
    "worker_requests_waiting": lambda load: load.waiting,
    "worker_kv_cache_usage_perc": lambda load: load.kv_blocks_used / max(1, load.kv_blocks_total),
    "worker_sleep_level": lambda load: load.sleep_level,
    "worker_preemptions": lambda load: load.preemptions,
    "worker_prefill_tokens": lambda load: load.prefill_tokens,
    "worker_decode_tokens": lambda load: load.decode_tokens,
}


def measure_workers(
    metrics: Metrics, workers: Callable[[], list[Member]], max_workers: int
) -> None:
    """Add the load of at most `max_workers` workers, those with the smallest ids."""

    def read() -> Iterator[Sample]:
        members = sorted(workers(), key=lambda each: each.beat.instance_id)
        for member in members[:max_workers]:
            load, models = member.beat.load, member.beat.models
            if load is None or not models:
                continue
            labels = {"model_name": models[0].name, "engine": member.beat.instance_id}
            for name, value_of in _READ_BY_NAME.items():
                yield Sample(name, labels, value_of(load))

    metrics.watch(tuple(_READ_BY_NAME), read)
