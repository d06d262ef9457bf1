"""Retraction: what to undo when rows of a step did not compute what was planned."""

from collections.abc import Collection, Sequence

from tokenmesh.services.worker_svc.engine.block_tables import held_by
from tokenmesh.services.worker_svc.engine.flight import Flight
from tokenmesh.services.worker_svc.engine.prefix_cache import PrefixCache
from tokenmesh.services.worker_svc.engine.request import Request
from tokenmesh.services.worker_svc.engine.saved_states import SavedState
from tokenmesh.services.worker_svc.engine.scheduler import Scheduler


def spoiled_by(
    lost: Sequence[tuple[Flight, Collection[int]]], scheduler: Scheduler, cache: PrefixCache
) -> tuple[list[Request], list[Request]]:
    """Take rows back that were not computed; whom that ends, and who must start over.

    lost holds the step that went wrong and those launched on top of it, in order, each with its
    own lost rows. What a lost row of the first step does in a later one is lost as well, and so
    is the work of everybody who shares a block that is not written, or who began with a state that
    is not saved. A request can only have hit what rows before it left, so one pass finds all.
    """
    failed: list[Request] = []
    misled: dict[Request, None] = {}
    spoiled: set[int] = set()
    unwritten: set[int] = set()
    unsaved: set[SavedState] = set()
    for index, (flight, lost_rows) in enumerate(lost):
        # a row that was given away since is another request's
        spoiled.difference_update(new.row for new in flight.plan.new_rows)
        spoiled.update(lost_rows)
        for row in flight.plan.rows:
            # nobody, when the request has ended or was preempted after the launch
            request = scheduler.rows.owner(row, flight.plan.step)
            if row not in spoiled:
                if request is None or (
                    not any(map(unwritten.intersection, held_by(request)))
                    and request.began_with not in unsaved
                ):
                    continue
                spoiled.add(row)
            if request is not None and index == 0 and row in lost_rows:
                failed.append(request)
            elif request is not None and request not in failed:
                misled[request] = None
            unwritten.update(cache.retract(flight.notes.registered, row))
            unsaved.update(cache.retract_states(flight.plan.saves, row))
    return failed, list(misled)
