"""The replay's trace, prompts, faults and score."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.replay import entries_of, main, parse, settings_of
from benchmarks.replay_run.faults import Fault, parse_fault, parse_slow
from benchmarks.replay_run.player import PlayedRequest
from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.score import score
from benchmarks.replay_run.trace import Entry, make_trace, most_cached, read_trace

LINE = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\n\n{LINE.replace('1500', '20')}\n")
    assert [entry.at_s for entry in read_trace(path)] == [0.02, 1.5]
    assert len(read_trace(path, limit=1)) == 1
    assert read_trace(path, until_s=1.0) == []


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"timestamp": 1}',
        LINE.replace("600", "5000"),
        LINE.replace("600", "0"),
        LINE.replace("1500", "-1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{LINE}\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        read_trace(path)


def test_what_is_made_up_can_be_read(tmp_path: Path) -> None:
    made = make_trace(50, rate=4.0, seed=1)
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, made)))
    assert read_trace(tmp_path / "t.jsonl") == made
    assert make_trace(50, rate=4.0, seed=1) == made
    assert 0.3 < most_cached(made) < 0.95


def test_equal_hashes_are_equal_tokens() -> None:
    prompts = Prompts(1536)
    first, second = prompts.ids(Entry(0, 1000, 1, [7, 8])), prompts.ids(Entry(0, 1024, 1, [7, 8]))
    assert (len(first), len(second)) == (1000, 1024)
    assert second[:1000] == first
    assert prompts.ids(Entry(0, 512, 1, [8])) == second[512:]
    assert Prompts(1536).ids(Entry(0, 512, 1, [7])) == first[:512]
    assert set(second) <= set(range(64, 1536))


def test_the_most_that_can_be_cached_counts_prefixes_only() -> None:
    entries = [Entry(0, 1024, 1, [1, 2]), Entry(1, 1024, 1, [1, 3]), Entry(2, 1024, 1, [3, 1])]
    assert most_cached(entries) == pytest.approx((512 + 1023) / 3072)


def test_faults_and_slow_workers_are_read() -> None:
    assert parse_fault("60:kill:2") == Fault(60.0, "kill", 2, 0.0)
    assert parse_fault("1.5:stop:1:20") == Fault(1.5, "stop", 1, 20.0)
    assert parse_slow("3:4") == (3, 4.0)
    for text in ("60", "60:burn:1", "x:kill:1"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_fault(text)
    with pytest.raises(ValueError, match="WORKER:FACTOR"):
        parse_slow("3")


def test_the_score_counts_errors_as_not_under_the_bound() -> None:
    played = [
        PlayedRequest(0, first_s=first, prompt_tokens=100, cached_tokens=50)
        for first in (1.0, 2.0, 9.0)
    ]
    played.append(PlayedRequest(0, error="http_429"))
    found = score(played, bound_s=5.0)
    assert (found["under_bound"], found["hit_rate"], found["ttft_p50"]) == (0.5, 0.5, 2.0)
    assert found["errors"] == {"http_429": 1}
    assert score([], 5.0)["ttft_p99"] == 0.0


def test_all_seconds_shrink_with_the_speed() -> None:
    options = parse(["--speed", "20", "--rate", "2", "--synthetic", "10", "--max-output", "1"])
    settings = settings_of(options, "round_robin")
    assert settings.worker.sim_time_scale == 0.05
    assert settings.scheduler.assumed_prefill_tokens_per_s == 160_000
    assert settings.scheduler.policy == "round_robin"
    plain = make_trace(10, rate=4.0, seed=0)
    assert [each.timestamp * 2 for each in entries_of(options)] == [e.timestamp for e in plain]
    assert {each.output_length for each in entries_of(options)} == {1}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_replay_survives_a_killed_and_a_frozen_worker(tmp_path: Path) -> None:
    faults = ["--fault", "4:kill:1:2", "--fault", "8:stop:2:3"]
    flags = ["--synthetic", "80", "--workers", "2", "--speed", "4", "--max-output", "8"]
    assert main([*flags, *faults, "--out", str(tmp_path / "out.json")]) == 0
    assert '"hit_rate"' in (tmp_path / "out.json").read_text()
