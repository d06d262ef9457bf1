"""What the trace says of a placement: the worker, why that one, and all that were weighed."""

from typing import Final

from tokenmesh.shared.messages import Placed
from tokenmesh.shared.telemetry import Span

_MAX_CANDIDATES: Final = 16


def trace_placement(current: Span, placed: Placed) -> None:
    """Write a decision to its span."""
    current.set_attribute("tokenmesh.worker", placed.worker_id)
    current.set_attribute("tokenmesh.queued_s", placed.queued_s)
    current.set_attribute("tokenmesh.placed_because", placed.reason)
    for each in placed.candidates[:_MAX_CANDIDATES]:
        candidate: dict[str, str | float] = {
            "worker": each.worker_id,
            "estimated_ttft_s": each.estimated_ttft_s,
            "cost_s": each.cost_s,
            "running": each.running,
            "kv_usage": each.kv_usage,
            "matched_tokens": each.matched_tokens,
            "reserved_tokens": each.reserved_tokens,
        }
        current.add_event("candidate", candidate)
