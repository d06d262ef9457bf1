"""bench_ops: every op's work equals its reference, and nothing red is reported."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from benchmarks import bench_ops
from benchmarks.ops.batch import parse_batch
from benchmarks.ops.catalog import WORKS
from benchmarks.ops.gate import RedTests, require_green, require_right
from benchmarks.ops.results import Limits, Sweep
from benchmarks.ops.work import Dimensions, Work
from benchmarks.timing import covering_passes

SIZES = Dimensions(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16)
CPU = torch.device("cpu")
BATCHES = ["q1", "q37", "5q1s70", "q9s40", "q20s33_3q1s17_2q6"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", BATCHES)
@pytest.mark.parametrize("op", sorted(WORKS))
def test_the_work_of_an_op_is_its_reference_and_torchs_way(
    op: str, text: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    work = WORKS[op](parse_batch(text), SIZES, dtype, CPU)
    require_right(op, work)
    if work.torch_way is not None:
        # torch's way rounds in between
        loose = replace(work, reference=work.torch_way, tolerance=5 * work.tolerance)
        require_right(op, loose)
    assert work.num_bytes > 0


def test_attention_counts_what_a_causal_mask_leaves() -> None:
    def flops(text: str) -> int:
        work = WORKS["paged_attention"](parse_batch(text), SIZES, torch.float32, CPU)
        return work.num_flops

    each = 4 * SIZES.heads * SIZES.head_dim
    assert flops("q1s10") == 10 * each
    assert flops("q4") == (1 + 2 + 3 + 4) * each
    assert flops("q2s9_3q1s5") == (8 + 9 + 3 * 5) * each


def test_a_decode_step_reads_each_key_once() -> None:
    work = WORKS["paged_attention"](parse_batch("3q1s50"), SIZES, torch.float32, CPU)
    keys = 3 * 50 * 2 * SIZES.kv_heads * SIZES.head_dim * 4
    query = 3 * SIZES.heads * SIZES.head_dim * 4
    assert work.num_bytes == keys + 2 * query


def wrong(work: Work) -> Work:
    def run() -> torch.Tensor:
        out = work.run().clone()
        out.view(-1)[-1] += 1.0
        return out

    return replace(work, run=run)


def test_a_wrong_result_is_red() -> None:
    work = WORKS["rms_norm"](parse_batch("q3"), SIZES, torch.float32, CPU)
    with pytest.raises(RedTests, match="rms_norm is wrong"):
        require_right("rms_norm", wrong(work))


def test_a_result_too_large_for_the_reference_is_held_against_torch() -> None:
    work = WORKS["linear"](parse_batch("q3"), SIZES, torch.float32, CPU)

    def never() -> torch.Tensor:
        raise AssertionError("this takes minutes")

    large = replace(work, num_flops=1 << 40, reference=never)
    require_right("linear", large)
    with pytest.raises(RedTests):
        require_right("linear", wrong(large))


class Pytest:
    """Answers what a test says and remembers what was asked."""

    def __init__(self, answer: Callable[[Sequence[str]], int]) -> None:
        self._answer = answer
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        self.commands.append(command)
        return subprocess.CompletedProcess(command, self._answer(command), "1 failed", "")


def test_the_ops_own_tests_are_run_first() -> None:
    run = Pytest(lambda _: 0)
    require_green("rope", CPU, run)
    (command,) = run.commands
    assert command[command.index("-k") + 1] == "rope"
    assert "tests/ops" in command


def test_on_a_gpu_the_cases_are_run_there() -> None:
    run = Pytest(lambda _: 0)
    require_green("rope", torch.device("cuda"), run)
    assert ["tests/ops" in each for each in run.commands] == [True, False]
    assert "gpu" in run.commands[1]
    assert "tests/kernels" in run.commands[1]


def test_an_op_without_kernels_of_ours_needs_no_cases_on_a_gpu() -> None:
    run = Pytest(lambda command: 0 if "tests/ops" in command else 5)
    require_green("linear", torch.device("cuda"), run)


@pytest.mark.parametrize(
    ("queueing_us", "pass_us", "passes"), [(30, 80, 1), (150, 80, 4), (9, 0.1, 100)]
)
def test_a_gpu_is_kept_busy_while_a_call_is_queued(
    queueing_us: float, pass_us: float, passes: int
) -> None:
    assert covering_passes(queueing_us / 1e6, pass_us / 1e6) == passes


@pytest.mark.parametrize(
    ("code_cpu", "code_gpu", "device", "reason"),
    [
        (1, 0, "cpu", "1 failed"),
        (2, 0, "cpu", "1 failed"),
        (5, 5, "cpu", "has no tests"),
        (0, 1, "cuda", "1 failed"),
        (0, 5, "cuda", "has no tests"),
    ],
)
def test_red_or_missing_tests_are_a_refusal(
    code_cpu: int, code_gpu: int, device: str, reason: str
) -> None:
    run = Pytest(lambda command: code_cpu if "tests/ops" in command else code_gpu)
    with pytest.raises(RedTests, match=reason):
        require_green("rope", torch.device(device), run)


def sweep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Sweep:
    """A sweep that needs neither pytest nor seconds."""
    monkeypatch.setattr(bench_ops, "memory_speed", lambda _: 1e12)
    monkeypatch.setattr(bench_ops, "product_speed", lambda *_: 1e12)
    options = bench_ops.parse(["--seconds", "0.001", "--dtype", "float32", *arguments])
    return bench_ops.sweep(options, Console(quiet=True))


def test_a_sweep_has_a_line_for_every_op_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ops, "require_green", lambda *_: None)
    found = sweep(monkeypatch, "--ops", "rms_norm", "rope", "--batches", "q3", "2q1s5")
    assert [(line.op, line.batch) for line in found.lines] == [
        ("rms_norm", "q3"),
        ("rms_norm", "2q1s5"),
        ("rope", "q3"),
        ("rope", "2q1s5"),
    ]
    assert found.red == {}
    for line in found.lines:
        assert line.us > 0
        assert line.reference_us is not None
        assert (line.torch_us is None) == (line.op == "rope")
        assert line.share == pytest.approx(line.gb_per_s / 1e3, abs=6e-3)
    bench_ops.show(found, Console(quiet=True))


def test_a_red_op_is_not_reported_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def green(op: str, _device: torch.device) -> None:
        if op == "rope":
            raise RedTests("its tests fail")

    monkeypatch.setattr(bench_ops, "require_green", green)
    found = sweep(monkeypatch, "--ops", "rope", "rms_norm", "nonsense", "--batches", "q3")
    assert {line.op for line in found.lines} == {"rms_norm"}
    assert found.red["rope"] == "its tests fail"
    assert "nonsense" in found.red["nonsense"]


def test_an_op_that_is_wrong_on_one_batch_loses_all_its_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_ops, "require_green", lambda *_: None)
    make = WORKS["rms_norm"]
    monkeypatch.setitem(
        WORKS,
        "rms_norm",
        lambda batch, *rest: (wrong if batch.text == "q4" else lambda work: work)(
            make(batch, *rest)
        ),
    )
    found = sweep(monkeypatch, "--ops", "rms_norm", "silu_mul", "--batches", "q3", "q4", "q5")
    assert {line.op for line in found.lines} == {"silu_mul"}
    assert "rms_norm on q4 is wrong" in found.red["rms_norm"]


def test_a_bad_batch_is_reported_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_ops.parse(["--batches", "q1", "nonsense"])
    assert "'nonsense' in 'nonsense' is not a group of sequences" in capsys.readouterr().err


def test_the_limit_that_binds_is_the_slower_one() -> None:
    limits = Limits(bytes_per_s=100.0, flops_per_s=1000.0)
    assert limits.shortest_s(50, 100) == 0.5
    assert limits.shortest_s(50, 2000) == 2.0
