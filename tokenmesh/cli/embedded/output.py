"""What the children write: JSON log lines, or plain text where something went wrong early."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.logs import PROGRESS, printable

_SEVERITY: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
WARNING: Final = 30
CRITICAL: Final = 50


@dataclass(frozen=True)
class Line:
    """A line of a child's output."""

    severity: int
    """As in `logging`; 0 for text that is no log line."""
    text: str
    exception: str = ""
    progress: float | None = None
    """How much of what the line is about is done, 0 to 1."""


def parse_line(text: str) -> Line:
    """Understand a line; what is no log record stays as it is."""
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
    """Why a child died: its critical complaints, else the last that it wrote."""
    lines = [parse_line(text) for text in tail]
    critical = [line for line in lines if line.severity >= CRITICAL]
    chosen = critical or lines
    parts = [part for line in chosen for part in (line.text, line.exception) if part]
    return "\n".join(parts).removeprefix("tokenmesh: ")
