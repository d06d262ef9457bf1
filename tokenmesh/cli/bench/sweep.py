"""Sweep: the highest request rate at which enough requests meet their goals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from tokenmesh.cli.bench.load import Outcome
from tokenmesh.cli.bench.report import meets
from tokenmesh.cli.bench.run import BenchRun
from tokenmesh.shared.errors import ConfigError

_MAX_RUNS: Final = 24
_UNMEASURED: Final = ("request_rate", "base_url")
"""Not compared with what a history was measured with: a mesh may have moved."""


class Point(msgspec.Struct, frozen=True):
    """The result at one rate, as the history keeps it."""

    rate: float
    """Requests a second."""
    met: float
    """Share of requests that met the goals."""
    config: dict[str, object]
    goals_ms: dict[str, float]


class Sweep:
    """Doubles the rate until the goals are missed, then halves the interval."""

    def __init__(
        self,
        run: BenchRun,
        goals_ms: Mapping[str, float],
        share: float,
        precision: float,
        history: Path | None,
    ) -> None:
        """`share`: of requests that must meet the goals; `precision`: of the rate, relative.

        Raises ConfigError when the history is not one.
        """
        self._run = run
        self._goals_ms = dict(goals_ms)
        self._share = share
        self._precision = precision
        self._history = history
        self._config = _comparable(run)
        self.points = {point.rate: point for point in self._known()}

    def search(
        self, measure: Callable[[BenchRun], Sequence[Outcome]], console: Console
    ) -> float | None:
        """The highest rate that was seen to meet the goals; None: there is none."""
        good, bad = 0.0, 0.0
        rate = self._run.request_rate
        for _ in range(_MAX_RUNS):
            if self._meets(rate, measure, console):
                good = rate
            else:
                bad = rate
            if bad and bad - good <= self._precision * bad:
                break
            rate = (good + bad) / 2 if bad else 2 * good
        return good or None

    def show(self, console: Console) -> None:
        """The points as a table."""
        table = Table("requests/s", "within the goals")
        for rate, point in sorted(self.points.items()):
            color = "green" if point.met >= self._share else "red"
            table.add_row(f"{rate:.3g}", f"[{color}]{point.met:.1%}")
        console.print(table)

    def _meets(
        self, rate: float, measure: Callable[[BenchRun], Sequence[Outcome]], console: Console
    ) -> bool:
        point = self.points.get(rate)
        if point is None:
            outcomes = measure(replace(self._run, request_rate=rate))
            met = sum(meets(each, self._goals_ms) for each in outcomes) / max(1, len(outcomes))
            point = Point(rate, met, self._config, self._goals_ms)
            self.points[rate] = point
            self._keep(point)
        console.print(f"{rate:.3g} requests/s: {point.met:.1%} within the goals")
        return point.met >= self._share

    def _known(self) -> list[Point]:
        if self._history is None or not self._history.exists():
            return []
        return [
            each
            for each in _read(self._history)
            if each.config == self._config and each.goals_ms == self._goals_ms
        ]

    def _keep(self, point: Point) -> None:
        if self._history is not None:
            with self._history.open("ab") as file:
                file.write(msgspec.json.encode(point) + b"\n")


def plot(
    sweeps: Mapping[str, Sweep], goals_ms: Mapping[str, float], share: float, path: Path
) -> None:
    """Write a picture of the points of sweeps, by their names. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    goals = ", ".join(f"{name} {goal:g} ms" for name, goal in goals_ms.items())
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, sweep in sweeps.items():
        rates = sorted(sweep.points)
        axes.plot(rates, [100 * sweep.points[rate].met for rate in rates], "o-", label=name)
    if len(sweeps) > 1:
        axes.legend()
    axes.axhline(100 * share, linestyle="--", color="gray")
    axes.set(xlabel="requests a second", ylabel=f"% within {goals}", ylim=(0, 102))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _read(history: Path) -> list[Point]:
    try:
        lines = history.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--history {history}: {error.strerror}", param="--history") from error
    points = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"--history {history}: line {number} is not a point of a sweep ({error}); "
                "remove the line, or name another file",
                param="--history",
            ) from error
    return points


def _comparable(run: BenchRun) -> dict[str, object]:
    """The settings as they come back from the history."""
    config = {name: value for name, value in run.config().items() if name not in _UNMEASURED}
    found: dict[str, object] = msgspec.json.decode(msgspec.json.encode(config, enc_hook=str))
    return found
