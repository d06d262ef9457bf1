"""Metrics of the host tier."""

from functools import partial

from tokenmesh.engine.kv.host_tier import HostStats
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.runner import HostImages
from tokenmesh.services.worker_svc.load import LoadBook
from tokenmesh.shared.metrics import Metrics

_STATES = ("free", "saving", "loading", "ready")


class HostTierMetrics:
    """These are the metrics of a worker that has one.

    Names that vLLM has mean what they mean there.
    """

    def __init__(
        self, metrics: Metrics, labels: dict[str, str], book: LoadBook, images: HostImages
    ) -> None:
        self._image_bytes = images.num_bytes
        self._last = HostStats({}, 0, 0)
        self._queries = metrics.counter("external_prefix_cache_queries", **labels)
        self._hits = metrics.counter("external_prefix_cache_hits", **labels)
        source = {**labels, "source": "external_kv_transfer"}
        self._from_host = metrics.counter("prompt_tokens_by_source", **source)
        self._cached = metrics.counter("prompt_tokens_cached_by_source", **source)
        moved = partial(metrics.counter, "kv_offload_bytes", **labels)
        self._saved = moved(direction="save")
        self._filled = moved(direction="fill")
        for state in _STATES:
            read = partial(_slots, book, state)
            metrics.gauge_of("kv_host_slots", read, **labels, state=state)

    def note(self, stats: HostStats | None) -> None:
        """Note what the engine's numbers are now."""
        if stats is not None:
            self._saved.inc((stats.saved - self._last.saved) * self._image_bytes)
            self._filled.inc((stats.filled - self._last.filled) * self._image_bytes)
            self._last = stats

    def note_ended(self, request: Request) -> None:
        """A request has ended that had a row."""
        num_filled = request.place.num_filled
        self._queries.inc(request.num_prompt - (request.place.num_cached or 0) + num_filled)
        for counter in (self._hits, self._from_host, self._cached):
            counter.inc(num_filled)


def _slots(book: LoadBook, state: str) -> int:
    host = book.stats.host
    return 0 if host is None else host.slots[state]
