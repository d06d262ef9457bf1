"""docs/benchmarks.md: current, and honest about bars that are not reached."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.bench_real_models import LLAMA, OURS, ModelLine, RealModelsResult, Side
from benchmarks.engine_results import (
    BoundLine,
)
from benchmarks.page import bars
from benchmarks.page.real_models import real_models_section
from benchmarks.peers.results import ModelResult, PeersResult
from benchmarks.peers.roster import PEERS, TITLES
from benchmarks.peers.sample import Sample
from benchmarks.serve.results import ROOT, environment, write_json
from benchmarks.write_page import PAGE, RESULTS, RUN_BY_HAND, SECTIONS, page


def sample(speed: float) -> list[Sample]:
    """Two rounds; the first is the better one."""
    return [Sample(speed, speed * 1.1, 100.0), Sample(speed / 2, speed / 2, 300.0)]


def model(**speeds: float) -> ModelResult:
    """Make a result of the shape of Qwen: each peer as fast at 1, 8 and 32 streams."""
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


def test_real_models_show_what_llama_cpp_did_and_where_it_did_not_run() -> None:
    ours, theirs = (
        Side(1.0, {128: rate}, 5.0, {1: rate / 10, 8: rate}, perplexity)
        for rate, perplexity in ((1000.0, 10.02), (500.0, 10.1))
    )
    lines = [
        ModelLine("both", 10, {OURS: ours, LLAMA: theirs}, 10.0),
        ModelLine("one", 10, {OURS: msgspec.structs.replace(ours, perplexity=None)}),
    ]
    config = {"threads": 2}
    found = [*real_models_section(RealModelsResult(config, dict(environment()), 1.0, lines))]
    assert "| both | 1,000 / 500 | 100 / 50 | 1,000 / 500 | 5.0 / 5.0 | 1.0 / 1.0 |" in found
    assert "| both | 10.000 | +0.20% | +1.00% |" in found
    assert any(line.startswith("| one | 1,000 / - |") for line in found)
