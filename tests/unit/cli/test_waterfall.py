"""A trace is drawn as a tree with bars on one time line."""

import io

import pytest
from rich.console import Console

from tokenmesh.cli.trace import TraceRow, bar, draw, notes, read_spans, tree

MS = 1_000_000
TRACE = {
    "trace_id": "t",
    "request_id": "chatcmpl-1",
    "spans": [
        {
            "name": "worker.prefill",
            "service": "worker",
            "span_id": "c",
            "parent_id": "b",
            "start_ns": 40 * MS,
            "end_ns": 60 * MS,
            "attributes": {"tokenmesh.request_id": "r", "tokenmesh.tokens": 7},
            "events": [{}, {}],
            "status": "ERROR",
        },
        {
            "name": "http",
            "service": "gateway",
            "span_id": "a",
            "parent_id": None,
            "start_ns": 0,
            "end_ns": 100 * MS,
            "attributes": {},
            "events": [],
            "status": "OK",
        },
        {
            "name": "generate",
            "service": "gateway",
            "span_id": "b",
            "parent_id": "a",
            "start_ns": 30 * MS,
            "end_ns": 90 * MS,
        },
    ],
}


def span(name: str, parent: str | None, start_ms: int, end_ms: int) -> TraceRow:
    return TraceRow(name, "gateway", name, parent, start_ms * MS, end_ms * MS)


def test_spans_stand_below_their_parents_in_order_of_time() -> None:
    order = [(depth, each.name) for depth, each in tree(read_spans(TRACE))]
    assert order == [(0, "http"), (1, "generate"), (2, "worker.prefill")]


def test_a_span_whose_parent_is_lost_is_shown_at_the_top() -> None:
    spans = [span("orphan", "lost", 5, 6), span("root", None, 0, 9)]
    assert [(depth, each.name) for depth, each in tree(spans)] == [(0, "root"), (0, "orphan")]


def test_a_bar_lies_where_the_span_lies_and_is_never_empty() -> None:
    assert bar(span("s", None, 50, 100), 0, 100 * MS, 10, "#") == "     #####"
    assert bar(span("s", None, 100, 100), 0, 100 * MS, 10, "#") == "         #"
    assert bar(span("s", None, 0, 0), 0, 0, 10, "#") == "#"


def test_notes_hold_attributes_without_the_ids_that_every_span_has() -> None:
    (first, *_) = read_spans(TRACE)
    assert notes(first) == "tokens=7 2 events"
    assert first.is_error


def test_a_drawing_names_times_and_services() -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as captured:
        console.print(draw(read_spans(TRACE), console))
    lines = captured.get().splitlines()
    assert "span" in lines[0]
    assert lines[3].split()[:3] == ["worker.prefill", "worker", "40.00"]
    assert " 20.00 " in lines[3]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_long_notes_take_no_room_from_names_and_times(width: int) -> None:
    texts: dict[str, object] = {f"tokenmesh.name_{number}": "x" * 40 for number in range(5)}
    spans = [
        TraceRow("POST /v1/chat/completions", "gateway", "a", None, 0, 123_456 * MS, texts),
        TraceRow("generate", "scheduler", "b", "a", 1 * MS, 100_000 * MS, texts),
    ]
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(draw(spans, console))
    _, first, second = captured.get().splitlines()
    assert first.split()[:4] == ["POST", "/v1/chat/completions", "gateway", "0.00"]
    assert second.split()[:3] == ["generate", "scheduler", "1.00"]
    assert "123456.00" in first
    assert ("name_0=" in first) == (width > 80)


def test_an_empty_trace_draws_a_header_only() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    with console.capture() as captured:
        console.print(draw([], console))
    assert len(captured.get().splitlines()) == 1
