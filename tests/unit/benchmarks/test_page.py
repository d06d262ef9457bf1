"""docs/benchmarks.md: current, and honest about what is missing, quoted or not reached."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.bench_embeddings import Case, EmbeddingsResult, texts_of
from benchmarks.engine_results import (
    BoundLine,
    BoundResult,
    DecodeLine,
    EngineResult,
    NanoLine,
    SchedulerLine,
    SchedulerResult,
)
from benchmarks.ops.results import Limits, Line, Sweep
from benchmarks.page import bars
from benchmarks.page.embeddings import embeddings_section
from benchmarks.peers.results import ModelResult, PeersResult
from benchmarks.peers.roster import PEERS, TITLES
from benchmarks.peers.sample import Sample
from benchmarks.serve.results import ROOT, environment, write_json
from benchmarks.write_page import PAGE, RESULTS, RUN_BY_HAND, SECTIONS, page


def sample(speed: float) -> list[Sample]:
    """Two rounds; the first is the better one."""
    return [Sample(speed, speed * 1.1, 100.0), Sample(speed / 2, speed / 2, 300.0)]


def model(**speeds: float) -> ModelResult:
    """Of Qwen's shape: each peer as fast at 1, 8 and 32 streams."""
    names = {name.replace("_", "-"): speed for name, speed in speeds.items()}
    by_peer = {name: sample(speed) for name, speed in names.items()}
    rounds = {1: by_peer, 8: by_peer, 32: by_peer}
    return ModelResult(
        "qwen2.5-0.5b", "Qwen", 10**9, [BoundLine("qwen2.5-0.5b", 25.0, 20.0, "sum")], rounds
    )


def peers_result(*models: ModelResult) -> PeersResult:
    config: dict[str, object] = {"prompt": 128, "tokens": 64, "rounds": 2, "threads": 2}
    config |= {"streams": 32, "requests": 9}
    return PeersResult(config, environment(), 0.5, "normal", {"torch": "2.13.0"}, [*models])


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(RESULTS), "run: python -m benchmarks.write_page"


def test_make_bench_writes_all_that_the_page_shows_of_this_machine() -> None:
    makefile = (ROOT / "Makefile").read_text()
    shown = {name for name, _, _ in SECTIONS} - RUN_BY_HAND
    assert [name for name in sorted(shown) if f"$(RESULTS)/{name}" not in makefile] == []


def test_every_peer_has_a_title() -> None:
    assert set(PEERS) <= set(TITLES)


def test_a_page_without_results_says_how_to_make_some(tmp_path: Path) -> None:
    assert "make bench" in page(tmp_path)
    assert "##" not in page(tmp_path)


def test_a_file_of_another_shape_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text('{"models": [{"name": 3}]}')
    with pytest.raises(msgspec.ValidationError):
        page(tmp_path)


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    result = peers_result(model(mesh=40.0, generate=10.0))
    result.models[0].missing = {"vllm": "RuntimeError: not installed\nand more"}
    write_json(tmp_path / "deeper" / "peers.json", result)
    data = (tmp_path / "deeper" / "peers.json").read_bytes()
    assert msgspec.json.decode(data, type=PeersResult) == result


def test_measured_and_quoted_numbers_are_distinguished(tmp_path: Path) -> None:
    shown = model(mesh=40.0, generate=10.0)
    shown.missing = {"vllm": "RuntimeError: not installed\nand more"}
    write_json(tmp_path / "peers.json", peers_result(shown))
    text = page(tmp_path)
    assert "| TokenMesh over HTTP | 40.0 | 40.0 | 40.0 |" in text
    assert "| *llama.cpp, without HTTP: quoted from another run* | *37* | *114* | *153* |" in text
    assert "Not measured: vLLM's CPU build over HTTP (RuntimeError: not installed)" in text
    assert "took 25.0 to 25.0 ms" in text
    assert "0.5 at the end" in text


@pytest.mark.parametrize(
    ("speeds", "row"),
    [
        ({"generate": 16.0}, ("transformers.generate, 1 stream", "2.5x", "2.50x", "yes")),
        ({"generate": 16.1}, ("transformers.generate, 1 stream", "2.5x", "2.48x", "**no**")),
        ({"vllm": 20.0}, ("vLLM's CPU build, 1 stream", "1.5x", "2.00x", "yes")),
        (
            {"vllm": 20.0, "vllm_all_cores": 30.0},
            ("vLLM's CPU build, 1 stream", "1.5x", "1.33x", "**no**"),
        ),
        ({}, ("vLLM's CPU build (quoted), 1 stream", "1.5x", "1.43x", "**no**")),
        ({}, ("llama.cpp (quoted), 1 stream", "1.0x", "1.08x", "yes")),
        ({}, ("llama.cpp (quoted), 8 streams", "1.0x", "0.35x", "**no**")),
        ({}, ("bandwidth bound, decode of 1 stream in-process", "85%", "80%", "**no**")),
    ],
)
def test_a_bar_holds_the_best_round_against_the_strongest_peer(
    speeds: dict[str, float], row: tuple[str, str, str, str]
) -> None:
    assert row in [*bars.rows(model(mesh=40.0, **speeds))]


def test_no_bar_is_reported_for_what_was_not_measured() -> None:
    assert len([*bars.rows(model(generate=10.0))]) == 1
    names = [name for name, *_ in bars.rows(model(mesh=40.0))]
    assert not any("transformers" in name for name in names)


def test_what_the_mesh_adds_is_held_against_its_bars(tmp_path: Path) -> None:
    def side(ttft_ms: float, speed: float) -> list[Sample]:
        return [Sample(speed, speed, ttft_ms)]

    def added(name: str, ttft_ms: float, speed: float) -> ModelResult:
        rounds = {
            1: {
                "mesh": side(20 + ttft_ms, 1),
                "engine": side(20, 1),
                "bus": side(0.25, 0),
            },
            32: {"mesh": side(1, speed), "engine": side(1, 100)},
        }
        return ModelResult(name, name, 1, rounds=rounds)

    models = [added("good", 1.2, 96), added("late", 1.6, 96), added("slow", 1.2, 94)]
    write_json(tmp_path / "overhead.json", peers_result(*models, ModelResult("none", "none", 1)))
    text = page(tmp_path)
    assert "| good | 1.20 | 0.25 | 4.0% | yes |" in text
    assert "| late | 1.60 | 0.25 | 4.0% | **no** |" in text
    assert "| slow | 1.20 | 0.25 | 6.0% | **no** |" in text
    assert "| none | - | - | - | not measured |" in text


def test_the_engine_and_the_scheduler_have_their_sections(tmp_path: Path) -> None:
    config: dict[str, object] = {"model": "qwen2.5-0.5b", "threads": 2, "clock": "wall"}
    decode = EngineResult(config, environment(), 0.1, decode=[DecodeLine(8, 200.0, 80.0)])
    write_json(tmp_path / "engine.json", decode)
    nano = EngineResult(config, environment(), 0.1, nano=NanoLine(16, 9000, 8000, 40.0, 100.0))
    write_json(tmp_path / "nano.json", nano)
    steps = SchedulerResult(environment(), 0.1, {256: SchedulerLine(70.5, 90)})
    write_json(tmp_path / "scheduler.json", steps)
    bound = BoundResult(2, environment(), 0.1, [BoundLine("qwen2.5-0.5b", 25.0, 21.25, "sum")])
    write_json(tmp_path / "bound.json", bound)
    text = page(tmp_path)
    assert "| 8 | 200.0 | 80.0 | 2.50x |" in text
    assert "| transformers continuous batching | 100.0 | 80.0 |" in text
    assert "16 of its 256 requests: 9,000 prompt and 8,000 output tokens" in text
    assert "| 256 | 70.5 | 90.0 | 100 |" in text
    assert "| qwen2.5-0.5b | 25.00 | 21.25 | 85% |" in text


def test_a_sweep_shows_its_limits_and_what_is_red(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "device": "cpu",
        "threads": 2,
        "dtype": "bfloat16",
        "model": "qwen2.5-0.5b",
    }
    lines = [Line("linear", "q1", 500.0, None, 900.0, 35.0, 0.04, 0.7)]
    limits = Limits(50e9, 1e12)
    red = {"rope": "the tests fail"}
    sweep = Sweep(config, environment(), 0.1, "cpu", limits, lines, red)
    write_json(tmp_path / "ops_cpu.json", sweep)
    text = page(tmp_path)
    assert "| linear `q1` | 500.0 | - | 900.0 | 35.0 | 0.04 | 70% |" in text
    assert "at most 50 GB/s and 1.00 TFLOP/s" in text
    assert "Not reported, because their tests fail: rope" in text


def test_a_fault_that_was_felt_for_too_long_does_not_hold(tmp_path: Path) -> None:
    silence = {"count": 9, "p50_ms": 60.0, "p99_ms": 101.0, "max_ms": 101.0}
    result = {
        "config": {"workers": 3, "step": 0.01, "concurrency": 8},
        "environment": environment(),
        "bounds_s": {"kill": 0.1},
        "silence_less_prefill": {"kill": silence},
        "failures": {"http_503": 2, "wrong": 1},
        "requests": 1000,
    }
    (tmp_path / "recovery.json").write_bytes(msgspec.json.encode(result))
    text = page(tmp_path)
    assert "| worker killed (SIGKILL) | 9 | 60.0 | 101.0 | 100 | **no** |" in text
    assert "Of 1,000 requests 3 failed." in text


def test_what_random_faults_left_behind_is_counted(tmp_path: Path) -> None:
    result = {
        "environment": environment(),
        "faults": 5,
        "seconds": 9.0,
        "streams": 70,
        "tokens": 1234,
        "failures": {},
        "leaks": ["a block"],
        "account_differences": ["one", "two"],
    }
    (tmp_path / "chaos.json").write_bytes(msgspec.json.encode(result))
    text = page(tmp_path)
    assert "| streams that failed or were wrong | none |" in text
    assert "| blocks, reservations, processes or files left | 1 |" in text
    assert "| differences in what tenants were charged | 2 |" in text


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        (1.4, "Ratio at p99: 1.40; holds: yes."),
        (1.6, "Ratio at p99: 1.60; holds: **no**."),
        (None, "Too few streams of a kind for a ratio."),
    ],
)
def test_gaps_of_streams_with_grammars_stand_beside_plain_ones(
    tmp_path: Path, ratio: float | None, sentence: str
) -> None:
    result = {
        "environment": environment(),
        "config": {"workers": 3, "concurrency": 12},
        "faults": 5,
        "seconds": 9.0,
        "streams": 1234,
        "failures": {},
        "leaks": [],
        "account_differences": [],
        "longest_gaps": {"plain": {"count": 120, "p50_ms": 7.2, "p99_ms": 88.0, "max_ms": 99.0}},
        "guided_ratio": ratio,
    }
    (tmp_path / "chaos_torch.json").write_bytes(msgspec.json.encode(result))
    text = page(tmp_path)
    assert "| plain | 120 | 7 | 88 | 99 |" in text
    assert sentence in text


def test_embeddings_are_beside_what_was_measured_in_the_same_run() -> None:
    cases = [
        Case(32, "short", mesh_s=0.1, sentence_transformers_s=0.3, infinity_s=0.2, distance=2e-7),
        Case(256, "long", mesh_s=10.0, sentence_transformers_s=14.0, distance=1e-7),
    ]
    config: dict[str, object] = {"threads": 2, "rounds": 3, "infinity-emb": "0.0.77"}
    text = "\n".join(embeddings_section(EmbeddingsResult(config, environment(), 0.5, cases)))
    assert "| 32, short | 320.0 | 106.7 | 160.0 | 3.00x | 2.0e-07 |" in text
    assert "| 256, 256 tokens | 25.6 | 18.3 | - | 1.40x | 1.0e-07 |" in text
    assert "it **does not hold** (at least 1.40x)" in text
    assert "; infinity-emb 0.0.77." in text


def test_texts_are_the_same_in_every_run() -> None:
    assert texts_of("short", 32) == texts_of("short", 32)
    assert {len(text.split()) for text in texts_of("long", 4)} == {400}
