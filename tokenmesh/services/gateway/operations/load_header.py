"""The load of a model's workers as a response header, in the formats of Envoy's ORCA reports."""

from collections.abc import Sequence
from typing import Final

from starlette.types import Scope

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.shared.membership import Member

_REQUEST_HEADER: Final = b"endpoint-load-metrics-format"
_HEADER: Final = b"endpoint-load-metrics"

Headers = list[tuple[bytes, bytes]]


def load_header(scope: Scope, workers: Sequence[Member]) -> Headers:
    """The response header if the request wants one, as TEXT or JSON; empty if no load is known."""
    wanted = dict(scope["headers"]).get(_REQUEST_HEADER)
    if wanted is None:
        return []
    kind = wanted.upper()
    if kind not in (b"TEXT", b"JSON"):
        context_of(scope).warnings.append("endpoint-load-metrics-format must be TEXT or JSON")
        return []
    metrics = _metrics(workers)
    if not metrics:
        return []
    if kind == b"JSON":
        return [(_HEADER, b"JSON " + encode_json({"named_metrics": metrics}))]
    pairs = (f"named_metrics.{name}={value:g}" for name, value in metrics.items())
    return [(_HEADER, b"TEXT " + ", ".join(pairs).encode())]


def _metrics(workers: Sequence[Member]) -> dict[str, float]:
    """vLLM's two metrics, over all workers."""
    loads = [member.beat.load for member in workers if member.beat.load is not None]
    if not loads:
        return {}
    num_blocks = sum(load.kv_blocks_total for load in loads)
    return {
        "kv_cache_usage_perc": sum(load.kv_blocks_used for load in loads) / max(1, num_blocks),
        "num_requests_waiting": float(sum(load.waiting for load in loads)),
    }
