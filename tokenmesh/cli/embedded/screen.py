"""The terminal of `tokenmesh up`: progress, the ready screen, and what children write."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tokenmesh.cli.embedded.supervisor import Death
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.log_fields import PROGRESS
from tokenmesh.shared.logs import printable

_SEVERITY: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
WARNING: Final = 30
CRITICAL: Final = 50


@dataclass(frozen=True)
class Line:
    """A line of a child's output."""

    severity: int
    """As in `logging`; 0 for text that is not a log record."""
    text: str
    exception: str = ""
    progress: float | None = None
    """The share of the work that the line is about which is done, 0 to 1."""


def parse_line(text: str) -> Line:
    """Parse a line; other text than log records stays as it is."""
    try:
        record = json.loads(text)
    except ValueError:
        return Line(0, printable(text))
    if not isinstance(record, dict) or record.get("level") not in _SEVERITY:
        return Line(0, printable(text))
    share = record.get(PROGRESS)
    return Line(
        _SEVERITY[record["level"]],
        printable(str(record.get("message"))),
        printable(str(record.get("exception", ""))),
        min(max(0.0, float(share)), 1.0) if isinstance(share, int | float) else None,
    )


def explanation(tail: Iterable[str]) -> str:
    """Why a child died: its critical records, else its last lines."""
    lines = [parse_line(text) for text in tail]
    critical = [line for line in lines if line.severity >= CRITICAL]
    chosen = critical or lines
    parts = [part for line in chosen for part in (line.text, line.exception) if part]
    return "\n".join(parts).removeprefix("tokenmesh: ")


_MAX_DETAIL: Final = 60
_BAR_WIDTH: Final = 24
_MENTIONED: Final = 4
"""Deaths of a child in a row that are all shown; of the later ones the 8th, the 16th and so on."""


class Screen:
    """The terminal of `up`; plain lines where there is no terminal."""

    def __init__(self, console: Console, *, is_verbose: bool) -> None:
        self._console = console
        self._is_verbose = is_verbose
        self._began_s = monotonic_s()
        self._wanted: Mapping[str, int] = {}
        self._counts: Mapping[str, int] = {}
        self._details: dict[str, str] = {}
        self._shares: dict[str, float | None] = {}
        """The progress of a service's last line, by the service."""
        self._live: Live | None = None

    def begin(self, wanted: Mapping[str, int]) -> None:
        """Show that these services start, and how many processes each has."""
        self._wanted = wanted
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._progress, console=self._console, transient=True)
            self._live.start()
        else:
            self._say(f"starting {', '.join(wanted)}")

    def progress(self, counts: Mapping[str, int]) -> None:
        """`counts`: processes of each service that send heartbeats."""
        for service, count in counts.items():
            if count >= self._wanted[service] > self._counts.get(service, 0):
                self._details.pop(service, None)
                if self._live is None:
                    self._say(f"{service} is up after {self._elapsed_s:.1f} s")
        self._counts = dict(counts)

    def line(self, child: str, text: str) -> None:
        """Show a line of a child: warnings always, other lines with --verbose."""
        line = parse_line(text)
        service = child.partition(" ")[0]
        self._details[service] = line.text[:_MAX_DETAIL]
        self._shares[service] = line.progress
        # A critical record is the last one: `restarting` or `dead` shows it.
        if self._is_verbose or WARNING <= line.severity < CRITICAL:
            self._say(f"{child}: {line.text}", "yellow" if line.severity >= WARNING else "dim")
            if line.exception:
                self._say(line.exception, "dim")

    def restarting(self, death: Death, pause_s: float) -> None:
        """A child died and is restarted. Repeated deaths are shown at growing intervals."""
        if death.in_a_row > _MENTIONED and death.in_a_row & (death.in_a_row - 1):
            return
        reason = explanation(death.tail).rpartition("\n")[2]
        often = f", {death.in_a_row} times in a row" if death.in_a_row > 1 else ""
        self._say(
            f"{death.name} died{often} (exit code {death.exit_code}), "
            f"starting it again in {pause_s:.2g} s: {reason}",
            "yellow",
        )

    def recovered(self, name: str, deaths: int) -> None:
        """A child runs again after repeated deaths."""
        if deaths > 1:
            self._say(f"{name} runs again after it died {deaths} times")

    def drained(self, name: str) -> None:
        """A drained child has ended and is not restarted."""
        self._say(f"{name} was drained and is not restarted")

    def end_progress(self) -> None:
        """The mesh is ready or will not be."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def ready(self, facts: Mapping[str, str], curl: str) -> None:
        """The one screen a user reads."""
        self.end_progress()
        self._console.print()
        self._say(f"TokenMesh is ready after {self._elapsed_s:.1f} s", "bold green")
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(Text(f"  {name}", style="dim"), Text(value))
        self._console.print(table)
        self._console.print()
        self._console.print(curl, markup=False, soft_wrap=True)
        self._console.print()

    def note(self, text: str) -> None:
        """Show a plain line."""
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(text, "yellow")

    def failed(self, model: str, death: Death) -> None:
        """Show why a model is not served, while the others are."""
        reason = explanation(death.tail).rpartition("\n")[2] or "its worker wrote nothing"
        self._say(f"{model} is not served: {reason}", "bold red")

    def dead(self, death: Death) -> None:
        """Show why a child is not restarted."""
        self.end_progress()
        self._say(f"{death.name} cannot run (exit code {death.exit_code}):", "bold red")
        self._say(explanation(death.tail) or "it wrote nothing", "red")

    @property
    def _elapsed_s(self) -> float:
        return monotonic_s() - self._began_s

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def _progress(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for service, wanted in self._wanted.items():
            count = self._counts.get(service, 0)
            mark = Text("ready", "green") if count >= wanted else Spinner("dots", "starting")
            of = f"{count}/{wanted}" if wanted > 1 else ""
            table.add_row(Text(f"  {service}"), mark, of, self._detail(service))
        table.add_row(Text(f"  {self._elapsed_s:.0f} s", "dim"))
        return table

    def _detail(self, service: str) -> RenderableType:
        """The last line and the progress of a service that is not ready."""
        if self._counts.get(service, 0) > 0:
            return ""
        text = Text(self._details.get(service, ""), "dim")
        share = self._shares.get(service)
        if share is None:
            return text
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(1.0, share, width=_BAR_WIDTH), text)
        return row
