"""A trace is drawn as a tree with bars on one time line."""

import io
import json

import httpx
import pytest
from rich.console import Console

from tokenmesh.cli import trace as trace_module
from tokenmesh.cli.api import GatewayClient
from tokenmesh.cli.main import MISUSE, run
from tokenmesh.cli.trace import (
    TraceRow,
    bar,
    draw,
    notes,
    read_spans,
    self_times,
    time_spent,
    tree,
)

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


def test_each_moment_counts_for_the_deepest_span() -> None:
    times = self_times(read_spans(TRACE))
    assert {name: spent // MS for (name, _), spent in times.items()} == {
        "http": 40,
        "generate": 40,
        "worker.prefill": 20,
    }


def test_of_overlapping_siblings_the_later_one_gets_the_time() -> None:
    spans = [span("root", None, 0, 10), span("a", "root", 1, 6), span("b", "root", 4, 8)]
    times = self_times(spans)
    assert {name: spent // MS for (name, _), spent in times.items()} == {"root": 3, "a": 3, "b": 4}


def test_a_sentence_names_the_steps_that_took_the_time() -> None:
    assert time_spent(read_spans(TRACE)) == (
        "100.0 ms in 3 spans; 1 failed: 40% in http (gateway), 40% in generate (gateway), "
        "20% in worker.prefill (worker)."
    )
    assert time_spent([]) == ""


class Traces:
    """A gateway with two traces; the older one is the longer one."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/traces":
            ping = {"trace_id": "ping", "request_id": None, "start_ns": 9 * MS, "end_ns": 9 * MS}
            new = {"trace_id": "new", "request_id": "r2", "start_ns": 5 * MS, "end_ns": 6 * MS}
            old = {"trace_id": "old", "request_id": "r1", "start_ns": 0, "end_ns": 4 * MS}
            return httpx.Response(200, json={"traces": [ping, new, old]})
        name = request.url.path.rpartition("/")[2]
        return httpx.Response(200, json={**TRACE, "trace_id": name})


@pytest.mark.parametrize(
    ("arguments", "shown"), [((), "new"), (("--slowest",), "old"), (("mine",), "mine")]
)
def test_without_an_id_the_last_or_the_slowest_trace_is_shown(
    arguments: tuple[str, ...],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transport = httpx.MockTransport(Traces())
    monkeypatch.setattr(trace_module, "GatewayClient", lambda a, b: GatewayClient(a, b, transport))
    assert run(["trace", *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"trace {shown} " in printed
    assert "40% in http" in printed
    assert run(["trace", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_id"] == shown


def test_a_gateway_without_traces_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"traces": []}))
    monkeypatch.setattr(trace_module, "GatewayClient", lambda a, b: GatewayClient(a, b, transport))
    assert run(["trace"]) == MISUSE
    assert "no trace" in capsys.readouterr().err
