"""A plan's row changes are applied in one place, in one order, whatever carries the plan out."""

import ast
from pathlib import Path
from typing import Any

from tests.fakes.engine_driver import greedy
from tokenmesh.engine.exec.apply import apply_rows
from tokenmesh.engine.plan import NewRow, ScheduledRow, StepPlan


class Heard:
    """Block tables that record calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def append_block(self, number: int, block: int) -> None:
        self.calls.append(("grow", number, block))

    def append_windowed(self, number: int, blocks: Any) -> None:
        self.calls.append(("windowed", number, blocks))

    def schedule(self, entry: ScheduledRow) -> None:
        self.calls.append(("schedule", entry.row))


def test_a_row_is_removed_before_it_is_given_away_and_grows_last() -> None:
    heard = Heard()
    plan = StepPlan(
        step=1,
        removed_rows=[3],
        new_rows=[NewRow(3, [1, 2], 2, greedy(4), [], False)],
        grown=[(5, 7)],
        grown_windowed=[(5, [8, 9])],
        decodes=[5],
        scheduled=[ScheduledRow(3, 0, 2, [4], samples=True)],
    )
    apply_rows(
        plan,
        heard,
        remove=lambda number: heard.calls.append(("remove", number)),
        add=lambda new: heard.calls.append(("add", new.row)),
    )
    assert heard.calls == [
        ("remove", 3),
        ("add", 3),
        ("grow", 5, 7),
        ("windowed", 5, [[8], [9]]),
        ("schedule", 3),
    ]


def test_no_runner_applies_row_changes_by_itself() -> None:
    changes = {"removed_rows", "new_rows", "grown", "grown_windowed"}
    readers = {
        path.name
        for path in Path("tokenmesh/engine/exec").rglob("*runner.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in changes
    }
    assert not readers
