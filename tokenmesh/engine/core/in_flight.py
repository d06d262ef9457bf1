"""In-flight steps, and what is undone when rows of one did not compute what was planned."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tokenmesh.engine.core.row_table import RowTable
from tokenmesh.engine.kv.prefix_cache import PrefixCache, Registered
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.runner import Launch


class PlannedChunk(NamedTuple):
    """Known tokens of a request that a step computes."""

    request: Request
    num_tokens: int
    num_cached: int = 0
    """Tokens before them that the prefix cache, the host tier included, saved it just now."""
    num_filled: int = 0
    """So many of the cached tokens are copied from the host tier."""


class StepNotes(msgspec.Struct):
    """For traces, rates and retraction."""

    prefills: list[PlannedChunk] = []
    preempted: list[Request] = []
    registered: list[Registered] = []
    """Blocks that the step fills and that can be found already."""
    computed: list[Request] = []
    """Requests of which nothing is drawn, and whose last token the step computes."""


@dataclass(slots=True)
class InFlightStep:
    plan: StepPlan
    notes: StepNotes
    launch: Launch
    started_ns: int
    """Wall clock; when it was launched or, if later, when the step before it ended."""
    started_s: float
    """The same instant on `perf_s`."""
    num_prefill: int
    """Tokens of prefill chunks."""
    num_decode: int
    """Its other tokens: one of each stream that decodes, and drafts."""
    lane: int = 0

    @property
    def rows(self) -> set[int]:
        """Those that compute something."""
        return set(self.plan.rows)


def corrupted_by(
    lost: Sequence[tuple[InFlightStep, Collection[int]]], rows: RowTable, cache: PrefixCache
) -> tuple[list[Request], list[Request]]:
    """Undo rows that were not computed: the requests that fail, and those to be computed again.

    lost holds the step that went wrong and those launched on top of it, in order, each with its
    own lost rows. What a lost row of the first step does in a later one is lost as well, and so
    is the work of every row that was admitted with a block that is not written, or with a state
    that is not saved. A request can only have hit blocks of rows that stand before it, so one pass
    finds all of them. Rows are judged by their plan: what a request held may be another's by now,
    and what it registered stays.
    """
    failed: list[Request] = []
    corrupted: dict[Request, None] = {}
    corrupted_rows: set[int] = set()
    unwritten: set[int] = set()
    unsaved: set[int] = set()
    """Slots that do not hold the state that was to be saved there."""
    for index, (step, lost_rows) in enumerate(lost):
        # a row that was given away since is another request's
        corrupted_rows.difference_update(new.row for new in step.plan.new_rows)
        corrupted_rows.update(lost_rows)
        hits = _hits_of(step.plan, cache.groups.block_size)
        states = {new.row: new.state for new in step.plan.new_rows}
        for row in step.plan.rows:
            if row not in corrupted_rows:
                if unwritten.isdisjoint(hits.get(row, ())) and states.get(row) not in unsaved:
                    continue
                corrupted_rows.add(row)
            # None when the request has ended or was preempted after the launch
            request = rows.owner(row, step.plan.step)
            if request is not None and index == 0 and row in lost_rows:
                failed.append(request)
            elif request is not None and request not in failed:
                corrupted[request] = None
            unwritten.update(cache.retract(step.notes.registered, row))
            cache.retract_states(step.plan.saves, row)
        for each in step.plan.saves:
            (unsaved.add if each.row in corrupted_rows else unsaved.discard)(each.slot)
    return failed, list(corrupted)


def _hits_of(plan: StepPlan, block_size: int) -> dict[int, list[int]]:
    """By row: the blocks that it was admitted with, of all groups, and that others fill."""
    admitted = {new.row for new in plan.new_rows}
    hits = {}
    for entry in plan.scheduled:
        if entry.row in admitted:
            num_hits = entry.start // block_size
            tables = (entry.new_blocks, *entry.new_windowed)
            own = {block for block, _ in entry.fills}
            hits[entry.row] = [
                block for table in tables for block in table[:num_hits] if block not in own
            ]
    return hits
