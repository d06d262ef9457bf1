"""Markdown tables and the line that says where numbers come from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines; all columns but the first are numbers."""
    rule = ["---", *("---:" for _ in heads[1:])]
    return [_row(heads), "|" + "|".join(rule) + "|", *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None, digits: int = 1) -> str:
    """With separators; a dash for what was not measured."""
    return "-" if value is None else f"{value:,.{digits}f}"


def origin(environment: Mapping[str, Any], load_end: float | None, more: str = "") -> str:
    """One line: when, where, which commit, how quiet."""
    commit = str(environment["git_commit"])[:9] + (" with changes" * environment["git_dirty"])
    load = f"load {environment['load_average']:.1f}"
    if load_end is not None:
        load += f" at the start, {load_end:.1f} at the end"
    place = f"{environment['num_cpus']} cores of {environment['cpu']}"
    return f"{str(environment['measured_at'])[:10]}, {place}, commit {commit}, {load}{more}."
