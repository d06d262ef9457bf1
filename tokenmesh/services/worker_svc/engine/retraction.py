"""Retraction: what to undo when rows of a step did not compute what was planned."""

from collections.abc import Container

from tokenmesh.services.worker_svc.engine.plan import StepPlan
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.request import Request
from tokenmesh.services.worker_svc.engine.scheduler import Scheduler


def spoiled_by(
    plan: StepPlan, failed_rows: Container[int], scheduler: Scheduler, cache: PrefixCache
) -> tuple[list[Request], list[Request]]:
    """Take a step's failed rows back: the failed requests, and those that share their new blocks.

    A request can only have hit blocks of rows that stand before it in the plan, so one pass finds
    all of them, those misled by a misled one included.
    """
    failed: list[Request] = []
    misled: list[Request] = []
    unwritten: set[int] = set()
    for entry in plan.scheduled:
        request = scheduler.request_at(entry.row)
        assert request is not None
        if entry.row in failed_rows:
            failed.append(request)
        elif unwritten and not unwritten.isdisjoint(request.blocks):
            misled.append(request)
        else:
            continue
        unwritten.update(cache.retract(request, entry.start, entry.start + entry.num_tokens))
    return failed, misled
