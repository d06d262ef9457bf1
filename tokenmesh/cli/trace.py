"""`tokenmesh trace`: the spans of a request as a waterfall on one time line."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from tokenmesh.cli.api import DEFAULT_URL, GatewayClient, Url
from tokenmesh.shared.errors import NotFound

_BAR_SHARE: Final = 4
_MIN_BAR: Final = 12
_MIN_NOTES: Final = 12
_COLUMNS: Final[tuple[tuple[str, JustifyMethod], ...]] = (
    ("span", "left"),
    ("service", "left"),
    ("at ms", "right"),
    ("", "left"),
    ("ms", "right"),
)
"""Titles and sides; notes come after them."""
_INDENT: Final = "  "
_STEPS_NAMED: Final = 3
_LEAST_SHARE: Final = 0.005
"""A step that took less than this share of the whole time is not named."""
_NS_PER_MS: Final = 1e6
_HIDDEN: Final = ("tokenmesh.request_id", "request_id")
_PREFIX: Final = "tokenmesh."
_COLORS: Final = {
    "gateway": "cyan",
    "tokenizer": "green",
    "encoder": "magenta",
    "scheduler": "yellow",
    "worker": "blue",
}


@dataclass(frozen=True)
class TraceRow:
    """One span as the gateway returns it. Times are nanoseconds."""

    name: str
    service: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, object] = field(default_factory=dict)
    num_events: int = 0
    is_error: bool = False


def read_spans(trace: Mapping[str, Any]) -> list[TraceRow]:
    """The spans of a trace as JSON holds it."""
    return [
        TraceRow(
            name=str(each["name"]),
            service=str(each["service"]),
            span_id=str(each["span_id"]),
            parent_id=each.get("parent_id") or None,
            start_ns=int(each["start_ns"]),
            end_ns=int(each["end_ns"]),
            attributes=each.get("attributes") or {},
            num_events=len(each.get("events") or ()),
            is_error=_is_error(each.get("status")),
        )
        for each in trace["spans"]
    ]


def tree(spans: Sequence[TraceRow]) -> Iterator[tuple[int, TraceRow]]:
    """Depth and span, parents before children, siblings by start.

    A span whose parent is not there stands at the top.
    """
    known = {span.span_id for span in spans}
    children: dict[str | None, list[TraceRow]] = {}
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        parent = span.parent_id if span.parent_id in known else None
        children.setdefault(parent, []).append(span)
    stack = [(0, span) for span in reversed(children.get(None, []))]
    while stack:
        depth, span = stack.pop()
        yield depth, span
        below = children.pop(span.span_id, [])
        stack += [(depth + 1, child) for child in reversed(below)]


def draw(spans: Sequence[TraceRow], console: Console) -> Table:
    """The waterfall, as wide as the console; notes where there is room for them."""
    begin_ns = min((span.start_ns for span in spans), default=0)
    total_ns = max((span.end_ns for span in spans), default=0) - begin_ns
    width = max(_MIN_BAR, console.width // _BAR_SHARE)
    filled = "\u2588" if console.encoding.startswith("utf") else "#"
    rows = [
        (
            Text(_INDENT * depth + span.name, "red" if span.is_error else ""),
            Text(span.service, _color(span)),
            Text(f"{(span.start_ns - begin_ns) / _NS_PER_MS:.2f}"),
            Text(bar(span, begin_ns, total_ns, width, filled), _color(span)),
            Text(f"{(span.end_ns - span.start_ns) / _NS_PER_MS:.2f}"),
            Text(notes(span)),
        )
        for depth, span in tree(spans)
    ]
    table, room = _columns(rows, console.width)
    for row in rows:
        table.add_row(*(row if room else row[:-1]))
    return table


def _color(span: TraceRow) -> str:
    return "red" if span.is_error else _COLORS.get(span.service, "white")


def _columns(rows: Sequence[Sequence[Text]], width: int) -> tuple[Table, int]:
    """A table without rows, and the cells that notes have; 0: none.

    Columns are as wide as they must be: rich would take from all of them what long notes want.
    """
    table, room = Table(box=None, padding=(0, 1, 0, 0), header_style="dim"), width
    for index, (title, side) in enumerate(_COLUMNS):
        cells = max(len(title), *(len(row[index]) for row in rows), 0)
        table.add_column(title, justify=side, no_wrap=True, width=cells)
        room -= cells + 1
    if room < _MIN_NOTES:
        return table, 0
    table.add_column("", no_wrap=True, overflow="ellipsis", style="dim", max_width=room)
    return table, room


def bar(span: TraceRow, begin_ns: int, total_ns: int, width: int, filled: str) -> str:
    """The span's place on the time line of the trace; at least one cell."""
    scale = width / max(1, total_ns)
    first = min(width - 1, int((span.start_ns - begin_ns) * scale))
    last = max(first + 1, round((span.end_ns - begin_ns) * scale))
    return " " * first + filled * (min(width, last) - first)


def notes(span: TraceRow) -> str:
    """Attributes and number of events on one line."""
    parts = [
        f"{name.removeprefix(_PREFIX)}={value}"
        for name, value in span.attributes.items()
        if name not in _HIDDEN
    ]
    if span.num_events:
        parts.append(f"{span.num_events} events")
    return " ".join(parts)


def _is_error(status: object) -> bool:
    """The status is a word, or an object with a code."""
    code = status.get("code") if isinstance(status, Mapping) else status
    return "error" in str(code).lower()


def self_times(spans: Sequence[TraceRow]) -> Counter[tuple[str, str]]:
    """Nanoseconds by (span name, service): each moment counts for the deepest span that runs then.

    Of spans of one depth the one that began last gets the moment.
    """
    waiting = sorted(
        ((span.start_ns, -depth, -index, span) for index, (depth, span) in enumerate(tree(spans))),
        key=lambda each: each[:3],
        reverse=True,
    )
    borders = sorted({each for span in spans for each in (span.start_ns, span.end_ns)})
    running: list[tuple[int, int, int, TraceRow]] = []
    times: Counter[tuple[str, str]] = Counter()
    for now_ns, next_ns in pairwise(borders):
        while waiting and waiting[-1][0] <= now_ns:
            start_ns, minus_depth, index, span = waiting.pop()
            heappush(running, (minus_depth, -start_ns, index, span))
        while running and running[0][3].end_ns <= now_ns:
            heappop(running)
        if running:
            span = running[0][3]
            times[span.name, span.service] += next_ns - now_ns
    return times


def time_spent(spans: Sequence[TraceRow]) -> str:
    """One sentence: how long it took, and which steps took most of that."""
    times = self_times(spans)
    total_ns = sum(times.values())
    if not total_ns:
        return ""
    shares = [
        f"{spent_ns / total_ns:.0%} in {name} ({service})"
        for (name, service), spent_ns in times.most_common(_STEPS_NAMED)
        if spent_ns / total_ns >= _LEAST_SHARE
    ]
    errors = sum(span.is_error for span in spans)
    failed = f"; {errors} failed" if errors else ""
    return f"{total_ns / _NS_PER_MS:.1f} ms in {len(spans)} spans{failed}: {', '.join(shares)}."


def trace(
    trace_id: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Id of a request or a trace; default: the last one."),
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key.")] = None,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="The longest of the traces that the gateway keeps.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The trace as JSON.")] = False,
) -> None:
    """Draw the spans of a request as a waterfall, and say where its time went."""
    with GatewayClient(url, api_key) as api:
        found = api.trace(trace_id or _choose(api, slowest=slowest))
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console(highlight=False)
    console.print(
        f"trace {found.get('trace_id')}  request {found.get('request_id')}",
        style="bold",
        markup=False,
        soft_wrap=True,
    )
    spans = read_spans(found)
    console.print(draw(spans, console))
    console.print(time_spent(spans), markup=False, soft_wrap=True)


def _choose(api: GatewayClient, *, slowest: bool) -> str:
    """The last trace of a request, or the longest one. Raises NotFound."""
    traces = api.traces()
    traces = [each for each in traces if each["request_id"]] or traces
    if not traces:
        raise NotFound("the gateway keeps no trace: send it a request first")
    if slowest:
        traces.sort(key=lambda each: int(each["start_ns"]) - int(each["end_ns"]))
    return str(traces[0]["trace_id"])
