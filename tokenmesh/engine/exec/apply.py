"""apply_rows: the row changes of a plan, in the order in which they take effect."""

from collections.abc import Callable, Sequence
from typing import Protocol

from tokenmesh.engine.plan import NewRow, ScheduledRow, StepPlan


class RowTables(Protocol):
    """The block tables that a runner keeps of its rows."""

    def append_block(self, number: int, block: int) -> None:
        """Extend a decoding row's table by a block."""

    def append_windowed(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        """Extend a row's table of each window group."""

    def schedule(self, entry: ScheduledRow) -> None:
        """Extend a row's tables by its new blocks."""


def apply_rows(
    plan: StepPlan,
    tables: RowTables,
    remove: Callable[[int], None],
    add: Callable[[NewRow], None],
) -> None:
    """Apply what a plan says of rows, see `StepPlan`; nothing is computed.

    `remove` and `add` take a row out of, and into, everything that a runner keeps of it.
    """
    for number in plan.removed_rows:
        remove(number)
    for new in plan.new_rows:
        add(new)
    for number, block in plan.grown:
        tables.append_block(number, block)
    for number, blocks in plan.grown_windowed:
        tables.append_windowed(number, [[block] for block in blocks])
    for entry in plan.scheduled:
        tables.schedule(entry)
