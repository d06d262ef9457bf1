"""The load generator against a server that says exactly what a test wants."""

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from benchmarks import bench_serve
from benchmarks.serve.client import Server
from benchmarks.serve.load import Load, Outcome
from benchmarks.serve.plot import plot
from benchmarks.serve.report import distribution, summarize
from benchmarks.serve.workload import Ask, Shape, file_asks, random_asks
from tests.fakes.scripted_http import (
    DONE,
    GOOD,
    Answer,
    event,
    piece,
    plain,
    serving,
    stream,
    usage,
)

SHAPE = Shape("demo", "completions", 0.0, True)


async def outcomes_of(answer: Answer, count: int = 4, timeout_s: float = 5) -> list[Outcome]:
    async with serving(answer) as url:
        load = Load(Server(url, "secret"), SHAPE, 2, timeout_s, lambda _: None)
        found = await load.closed([Ask([1, 2, 3], 3)] * count)
        load.close()
    return found


async def test_who_gives_up_hangs_up() -> None:
    has_left = asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        has_left.set()
        writer.close()

    async with await asyncio.start_server(wait_for_the_end, "127.0.0.1", 0) as server:
        client = Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        connection = await client.connect()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.send(client.request("GET", "/"))
        await asyncio.wait_for(has_left.wait(), 5)


async def test_a_good_stream_is_measured() -> None:
    (outcome,) = await outcomes_of(lambda _path, _body: stream(GOOD), count=1)
    assert outcome.error is None
    assert len(outcome.token_times) == 3
    assert (outcome.prompt_tokens, outcome.output_tokens) == (5, 3)
    assert outcome.began_s < outcome.token_times[0] <= outcome.token_times[2] <= outcome.ended_s


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (stream([piece("a"), piece("b", "length"), usage(2), DONE]), "wrong_count"),
        (stream([piece("a"), usage(3)]), "truncated"),
        (stream([piece("a"), piece("b"), DONE]), "no_usage"),
        (stream([piece("a"), event({"error": {"code": "overloaded"}})]), "stream_overloaded"),
        (stream([b"data: no json\n\n"]), "hung_up"),
        (plain(429, {"error": {"message": "full"}}), "http_429"),
        (b"no HTTP at all\r\n\r\n", "hung_up"),
        (b"", "hung_up"),
    ],
    ids=["count", "truncated", "usage", "error", "json", "status", "garbage", "closed"],
)
async def test_each_fault_is_told_by_its_kind(answer: bytes, kind: str) -> None:
    outcomes = await outcomes_of(lambda _path, _body: answer)
    assert [outcome.error for outcome in outcomes] == [kind] * 4


async def test_a_silent_server_is_a_timeout() -> None:
    head = stream([piece("a")])[:-5]
    (outcome,) = await outcomes_of(lambda _path, _body: head, count=1, timeout_s=0.05)
    assert outcome.error == "timeout"


async def test_nobody_there_is_refused() -> None:
    async with serving(lambda _path, _body: b"") as url:
        pass
    (outcome,) = await Load(Server(url, None), SHAPE, 1, 5, lambda _: None).closed([Ask([1], 3)])
    assert outcome.error == "refused"


async def test_a_role_chunk_is_no_token_and_a_tool_call_is() -> None:
    def delta(**content: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": content}]})

    parts = (
        b": keep-alive\n\n",
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(content="x"),
        delta(tool_calls=[{"index": 0}]),
        usage(3),
        DONE,
    )
    (outcome,) = await outcomes_of(lambda _path, _body: stream(parts), count=1)
    assert outcome.error is None
    assert len(outcome.token_times) == 3


async def test_the_closed_loop_keeps_to_its_concurrency() -> None:
    seen: list[str] = []

    def answer(path: str, _body: object) -> bytes:
        seen.append(path)
        return stream(GOOD)

    outcomes = await outcomes_of(answer, count=10)
    assert seen == ["/v1/completions"] * 10
    begins = sorted(outcome.began_s for outcome in outcomes)
    ends = sorted(outcome.ended_s for outcome in outcomes)
    assert all(begin >= end for begin, end in zip(begins[2:], ends[:-2], strict=True))


async def test_the_open_loop_counts_from_when_a_request_was_due() -> None:
    async with serving(lambda _path, _body: stream(GOOD)) as url:
        load = Load(Server(url, "secret"), SHAPE, 1, 5, lambda _: None)
        outcomes = await load.open([Ask([1], 3)] * 20, 1000.0, Random(1))
        load.close()
    assert [outcome.error for outcome in outcomes] == [None] * 20
    dues = [outcome.began_s for outcome in outcomes]
    random = Random(1)
    gaps = [random.expovariate(1000.0) for _ in range(19)]
    assert [later - before for before, later in pairwise(dues)] == pytest.approx(gaps, abs=1e-9)


async def test_random_completions_are_exact_and_reproducible() -> None:
    bodies: list[dict[str, object]] = []

    def answer(_path: str, body: dict[str, object]) -> bytes:
        bodies.append(body)
        return plain(200, {"tokens": [*range(40, 90)], "count": 50})

    async with serving(answer) as url:
        server = Server(url, None)
        first = await random_asks(server, SHAPE, 3, (20, 8), Random(7))
        again = await random_asks(server, SHAPE, 3, (20, 8), Random(7))
        chat = Shape("demo", "chat", 0.0, True)
        words = await random_asks(server, chat, 3, (20, 8), Random(7))
    assert first == again
    assert {len(ask.prompt) for ask in first} == {20}
    assert {token for ask in first for token in ask.prompt} <= {*range(40, 90)}
    assert all(isinstance(ask.prompt, str) for ask in words)
    assert bodies[0]["model"] == "demo"


def test_prompts_come_from_a_file_in_two_shapes(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "two"}]
    path.write_text(
        '{"prompt": "one", "output_len": 3}\n\n' + json.dumps({"conversations": turns}) + "\n"
    )
    asks = file_asks(path, 4, 9, Random(0))
    assert sorted({(str(ask.prompt), ask.output_len) for ask in asks}) == [("one", 3), ("two", 9)]
    assert len(asks) == 4
    path.write_text('{"prompt": "one"}\n{"text": "?"}\n')
    with pytest.raises(ValueError, match="line 2"):
        file_asks(path, 4, 9, Random(0))


def test_percentiles_interpolate() -> None:
    found = distribution([0.001 * number for number in range(1, 102)])
    assert found["percentiles"] == {"p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0}
    assert (found["mean"], found["max"]) == (51.0, 101.0)
    assert distribution([])["mean"] == 0.0


def test_the_summary_counts_only_good_requests() -> None:
    good = Outcome(10.0, 12.0, [10.5, 11.0, 11.5], 5, 3)
    bad = Outcome(10.0, 14.0, [10.1], 5, 1, "wrong_count")
    summary = summarize([good, bad])
    assert (summary["completed"], summary["errors"]) == (1, {"wrong_count": 1})
    assert summary["output_tokens_per_s"] == 3 / 4
    assert summary["ttft_ms"]["mean"] == 500.0
    assert summary["itl_ms"]["mean"] == 500.0
    assert summary["tpot_ms"]["mean"] == 500.0
    assert summary["e2e_ms"]["max"] == 2000.0


def test_a_plot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    plot([Outcome(10.0, 12.0, [10.5, 11.0, 11.5], 5, 3)], "a run", path)
    assert path.read_bytes().startswith(b"\x89PNG")


async def test_the_command_writes_what_it_measured(tmp_path: Path) -> None:
    def answer(path: str, _body: object) -> bytes:
        if path == "/v1/models":
            return plain(200, {"data": [{"id": "demo"}]})
        if path == "/tokenize":
            return plain(200, {"tokens": [1, 2, 3]})
        return stream(GOOD)

    out = tmp_path / "run.json"
    async with serving(answer) as url:
        line = f"--base-url {url} --num-requests 6 --output-len 3 --request-rate 500 --out {out}"
        options = bench_serve.parse([*line.split(), "--api-key", "secret"])
        outcomes = await bench_serve.run(options, Console(quiet=True))
    summary = summarize(outcomes)
    assert (summary["completed"], summary["errors"]) == (6, {})
    bench_serve.save(options, summary)
    saved = json.loads(out.read_text())
    assert saved["config"]["model"] == "demo"
    assert saved["results"]["output_tokens"] == 18
    assert saved["environment"]["num_cpus"] >= 1
    assert "secret" not in out.read_text()
