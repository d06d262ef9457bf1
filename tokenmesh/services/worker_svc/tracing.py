"""Tracing: the spans of a stream, made from its timeline after its end.

`worker.grammar` where one had to be compiled, `worker.queue`, one `worker.prefill` a chunk,
`worker.decode` with its steps as events.
"""

from typing import Final

from tokenmesh.services.worker_svc.engine.outputs import Ended
from tokenmesh.services.worker_svc.engine.timeline import TimelineStep
from tokenmesh.shared.telemetry import REQUEST_ID, TimedEvent, record_span

GRAMMAR: Final = "worker.grammar"
QUEUE: Final = "worker.queue"
PREFILL: Final = "worker.prefill"
DECODE: Final = "worker.decode"

_SAMPLED: Final = frozenset("13579bdf")
"""Last digits of a traceparent whose lowest flag, `sampled`, is set."""


def sampled(traceparent: str | None) -> str | None:
    """The traceparent, if anybody will look at the trace."""
    return traceparent if traceparent and traceparent[-1] in _SAMPLED else None


def record_spans(ended: Ended) -> None:
    """Record everything that happened to the stream; nothing for an untraced one."""
    parent = ended.request.traceparent
    if parent is None:
        return
    timeline = ended.request.timeline
    identity = {REQUEST_ID: ended.request.request_id}
    queue_end_ns = timeline.first_scheduled_ns or timeline.ended_ns
    queue_start_ns = timeline.grammar_ns or timeline.arrived_ns
    if timeline.grammar_ns:
        record_span(GRAMMAR, timeline.arrived_ns, timeline.grammar_ns, parent, identity)
    record_span(QUEUE, queue_start_ns, queue_end_ns, parent, identity)
    for chunk in timeline.chunks:
        attributes: dict[str, str | int] = {
            **identity,
            "tokens": chunk.num_tokens,
            "cached_tokens": chunk.num_cached,
            "batch_size": chunk.batch_size,
        }
        record_span(PREFILL, chunk.start_ns, chunk.end_ns, parent, attributes)
    if timeline.first_token_ns:
        _record_decode(ended, parent)


def _record_decode(ended: Ended, parent: str) -> None:
    request = ended.request
    timeline = request.timeline
    attributes: dict[str, str | int] = {
        REQUEST_ID: request.request_id,
        "prompt_tokens": request.num_prompt,
        "output_tokens": request.num_known - request.num_prompt,
        "cached_tokens": request.num_cached or 0,
        "preemptions": request.num_preemptions,
        "finish_reason": ended.ending.reason,
    }
    events: list[TimedEvent] = [_step_event(step) for step in ended.steps]
    events += [("preempted", at_ns, None) for at_ns in timeline.preempted_ns]
    events.sort(key=lambda event: event[1])
    record_span(
        DECODE, timeline.first_token_ns, timeline.ended_ns, parent, attributes, events=events
    )


def _step_event(step: TimelineStep) -> TimedEvent:
    facts = {"batch_size": step.batch_size, "tokens": step.num_tokens, "kv_used": step.kv_used}
    return ("step", step.end_ns, facts)
