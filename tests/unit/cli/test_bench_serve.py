"""The load generator against a server that says exactly what a test wants."""

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

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
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.commands import SOME_FAILED
from tokenmesh.cli.bench.load import Load, Outcome
from tokenmesh.cli.bench.plot import plot
from tokenmesh.cli.bench.report import distribution, meets, summarize
from tokenmesh.cli.bench.run import BenchRun
from tokenmesh.cli.bench.speculation import DraftCounters
from tokenmesh.cli.bench.sweep import Sweep
from tokenmesh.cli.bench.sweep import plot as plot_sweeps
from tokenmesh.cli.bench.workload import Ask, RandomPrompts, RequestShape, file_asks
from tokenmesh.cli.main import MISUSE, run

SHAPE = RequestShape("demo", "completions", 0.0, True)


async def outcomes_of(answer: Answer, count: int = 4, timeout_s: float = 5) -> list[Outcome]:
    async with serving(answer) as url:
        load = Load(Target(url, "secret"), SHAPE, 2, timeout_s, lambda _: None)
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
        client = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        connection = await client.connect()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.send(client.request("GET", "/"))
        await asyncio.wait_for(has_left.wait(), 15)


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
async def test_each_fault_is_reported_by_its_kind(answer: bytes, kind: str) -> None:
    outcomes = await outcomes_of(lambda _path, _body: answer)
    assert [outcome.error for outcome in outcomes] == [kind] * 4


async def test_a_silent_server_is_a_timeout() -> None:
    head = stream([piece("a")])[:-5]
    (outcome,) = await outcomes_of(lambda _path, _body: head, count=1, timeout_s=0.05)
    assert outcome.error == "timeout"


async def test_an_absent_server_is_a_refused_connection() -> None:
    async with serving(lambda _path, _body: b"") as url:
        pass
    (outcome,) = await Load(Target(url, None), SHAPE, 1, 5, lambda _: None).closed([Ask([1], 3)])
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
        load = Load(Target(url, "secret"), SHAPE, 1, 5, lambda _: None)
        outcomes = await load.open([Ask([1], 3)] * 20, 1000.0, Random(1))
        load.close()
    assert [outcome.error for outcome in outcomes] == [None] * 20
    dues = [outcome.began_s for outcome in outcomes]
    random = Random(1)
    gaps = [random.gammavariate(1.0, 0.001) for _ in range(19)]
    assert [later - before for before, later in pairwise(dues)] == pytest.approx(gaps, abs=1e-9)


async def test_random_completions_are_exact_and_reproducible() -> None:
    bodies: list[dict[str, object]] = []

    def answer(_path: str, body: dict[str, object]) -> bytes:
        bodies.append(body)
        return plain(200, {"tokens": [*range(40, 90)], "count": 50})

    async with serving(answer) as url:
        server = Target(url, None)
        prompts = RandomPrompts(20, 8)
        first = await prompts.asks(server, SHAPE, 3, Random(7))
        again = await prompts.asks(server, SHAPE, 3, Random(7))
        chat = RequestShape("demo", "chat", 0.0, True)
        words = await prompts.asks(server, chat, 3, Random(7))
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


def answer(path: str, _body: object) -> bytes:
    if path == "/v1/models":
        return plain(200, {"data": [{"id": "demo"}]})
    if path == "/tokenize":
        return plain(200, {"tokens": [1, 2, 3]})
    return stream(GOOD)


async def command(*arguments: str) -> int:
    """The exit code of `tokenmesh bench`, which runs an event loop of its own."""
    return await asyncio.to_thread(run, ["bench", *arguments])


async def test_the_command_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    async with serving(answer) as url:
        line = (
            f"serve --base-url {url} --num-prompts 6 --output-len 3 --request-rate 500 "
            f"--goodput ttft:5000 e2el:0.0001 --api-key secret --result {out}"
        )
        assert await command(*line.split()) == 0
    saved = json.loads(out.read_text())
    assert saved["config"]["request_rate"] == 500
    assert saved["config"]["output_len"] == 3
    assert (saved["results"]["completed"], saved["results"]["output_tokens"]) == (6, 18)
    assert saved["results"]["goodput_per_s"] == 0
    assert "secret" not in out.read_text()
    assert "time to first token" in capsys.readouterr().err


async def test_a_failed_request_is_the_exit_code() -> None:
    def refuse(path: str, body: object) -> bytes:
        is_asked = path == "/v1/completions"
        return plain(429, {"error": {"message": "full"}}) if is_asked else answer(path, body)

    async with serving(refuse) as url:
        assert await command("serve", "--base-url", url, "--num-prompts", "2") == SOME_FAILED


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --goodput speed:3", "speed:3"),
        ("serve --goodput ttft:fast", "fast"),
        ("serve --goodput ttft:0", "above 0"),
        ("serve --request-rate 0", "above 0"),
        ("serve --backend tgi", "tgi"),
        ("serve --dataset-name sharegpt", "--dataset-path"),
        ("serve --dataset-name custom --dataset-path nowhere.jsonl", "nowhere.jsonl"),
        ("serve --metric-percentiles 101", "101"),
        ("serve --percentile-metrics ttft,x", "x"),
        ("serve --base-url http://127.0.0.1:1", "127.0.0.1:1"),
        ("sweep", "--goodput"),
    ],
)
async def test_wrong_options_are_a_sentence(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await command(*line.split()) == MISUSE
    assert message in capsys.readouterr().err


def bench_run() -> BenchRun:
    return BenchRun(
        base_url="http://mesh", model="demo", endpoint="completions", dataset=None,
        prompts=RandomPrompts(8, 4), num_prompts=100, request_rate=1.0, burstiness=1.0,
        max_concurrency=8, num_warmups=0, temperature=0.0, ignore_eos=True, timeout_s=1.0, seed=0,
    )  # fmt: skip


def test_a_sweep_finds_the_highest_rate_and_remembers_it(tmp_path: Path) -> None:
    rates: list[float] = []

    def measure(each: BenchRun) -> list[Outcome]:
        """A server that answers within 100 ms up to 10.6 requests a second."""
        rates.append(each.request_rate)
        late_s = 0.1 if each.request_rate <= 10.6 else 9.0
        return [Outcome(0.0, 10.0, [late_s], 8, 1)] * each.num_prompts

    history = tmp_path / "history.jsonl"
    sweep = Sweep(bench_run(), {"ttft": 500.0}, 0.95, 0.1, history)
    console = Console(quiet=True)
    assert sweep.search(measure, console) == 10.0
    assert rates == [1.0, 2.0, 4.0, 8.0, 16.0, 12.0, 10.0, 11.0]
    picture = tmp_path / "sweep.png"
    plot_sweeps({"": sweep}, {"ttft": 500.0}, 0.95, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    # a second search reads all points from the history
    again = Sweep(bench_run(), {"ttft": 500.0}, 0.95, 0.1, history)
    assert again.search(measure, console) == 10.0
    assert len(rates) == 8
    other = Sweep(bench_run(), {"ttft": 400.0}, 0.95, 0.1, history)
    assert other.points == {}


def test_a_sweep_without_any_good_rate_says_so() -> None:
    bad = [Outcome(0.0, 1.0, [], 0, 0, "timeout")]
    sweep = Sweep(bench_run(), {"ttft": 1.0}, 0.95, 0.1, None)
    assert sweep.search(lambda _: bad, Console(quiet=True)) is None


def test_a_request_must_meet_every_goal() -> None:
    outcomes = Outcome(0.0, 1.0, [0.4, 0.5], 5, 2)
    assert meets(outcomes, {"ttft": 400.0, "itl": 101.0, "tpot": 101.0, "e2el": 1000.0})
    for name in ("ttft", "itl", "tpot", "e2el"):
        assert not meets(outcomes, {name: 50.0})


async def test_lengths_vary_around_their_mean_and_prompts_share_a_prefix() -> None:
    def tokens(_path: str, _body: object) -> bytes:
        return plain(200, {"tokens": [*range(40, 90)], "count": 50})

    async with serving(tokens) as url:
        prompts = RandomPrompts(20, 10, range_ratio=0.5, prefix_len=4)
        asks = await prompts.asks(Target(url, None), SHAPE, 50, Random(1))
    lengths = {len(ask.prompt) - 4 for ask in asks}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 5
    assert len({tuple(ask.prompt[:4]) for ask in asks}) == 1
    assert {5 <= ask.output_len <= 15 for ask in asks} == {True}


def test_sharegpt_is_one_array_and_may_hold_conversations_without_a_user(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talks = [[{"from": "gpt", "value": "x"}], [{"from": "human", "value": "hi"}]]
    path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    assert file_asks(path, 2, 7, Random(0)) == [Ask("hi", 7)] * 2


def counters(scale: int, prefix: str) -> bytes:
    page = f"""# TYPE {prefix}:spec_decode_num_drafts counter
{prefix}:spec_decode_num_drafts_total{{model_name="m",engine="a"}} {scale}
{prefix}:spec_decode_num_drafts_total{{model_name="m",engine="b"}} {scale}.0
{prefix}:spec_decode_num_draft_tokens_total{{model_name="m",engine="a"}} {8 * scale}
{prefix}:spec_decode_num_accepted_tokens_total{{model_name="m",engine="a"}} {3 * scale}
{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{engine="a",position="0"}} {2 * scale}
{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{position="1",engine="a"}} {scale}
{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{position="2",engine="a"}} 0
"""
    body = page.encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("prefix", ["tokenmesh", "vllm"])
async def test_drafts_of_a_run_are_the_difference_of_the_servers_counters(prefix: str) -> None:
    scales = iter((10, 110))
    async with serving(lambda _path, _body: counters(next(scales), prefix)) as url:
        drafts = DraftCounters(Target(url, None))
        await drafts.begin()
        found = await drafts.found()
    assert found == {
        "spec_decode_acceptance_rate": 37.5,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 200,
        "spec_decode_draft_tokens": 800,
        "spec_decode_accepted_tokens": 300,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5],
    }


async def test_a_server_without_metrics_or_drafts_shows_none() -> None:
    answers = iter([plain(403, {})] * 2 + [plain(200, {"no": "metrics"})] * 2)
    async with serving(lambda _path, _body: next(answers)) as url:
        for _ in range(2):
            drafts = DraftCounters(Target(url, None))
            await drafts.begin()
            assert await drafts.found() is None
