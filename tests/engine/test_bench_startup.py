"""The startup benchmark on a tiny checkpoint: the stages add up, and files are really read."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.bench_startup import Stages, StartupResult, plain_read_s, report, start, write
from benchmarks.up_memory import UpResult, pss_of, report_up
from benchmarks.write_page import page
from tests.fakes.tiny import Tiny


def test_the_stages_are_the_whole_way_to_the_first_token(tiny: Tiny) -> None:
    directory = tiny("llama").directory
    began_s = time.time() - 1.0
    stages = start(directory, began_s, "float32")
    parts = ("import_s", "read_s", "pack_s", "pool_s", "other_s", "first_token_s")
    assert sum(getattr(stages, each) for each in parts) == pytest.approx(stages.ready_s)
    assert all(getattr(stages, each) > 0 for each in parts)
    assert stages.import_s >= 1.0
    size = (directory / "model.safetensors").stat().st_size
    assert 0.9 * size < stages.num_bytes < size


def test_ratios_are_against_the_plain_read(tmp_path: Path) -> None:
    stages = Stages(
        import_s=1.0,
        read_s=0.5,
        pack_s=1.0,
        pool_s=0.1,
        other_s=0.2,
        first_token_s=0.3,
        ready_s=3.1,
        num_bytes=2_000_000_000,
        plain_read_s=0.4,
    )
    assert (stages.read_ratio, stages.load_ratio) == (1.25, 3.75)
    text = report(stages)
    for part in ("first_token", "3.10 s", "read at 4.0 GB/s", "plain read 5.0 GB/s", "3.75 times"):
        assert part in text
    write(tmp_path / "startup.json", stages, {"model": "m"})
    data = (tmp_path / "startup.json").read_bytes()
    kept = msgspec.json.decode(data, type=StartupResult)
    assert kept.stages == stages
    assert {"cpu", "git_commit", "load_average"} <= kept.environment.keys()
    shown = page(tmp_path)
    assert "reading takes 1.25 and loading 3.75 times a plain read" in shown
    assert "| first token | 0.30 |" in shown


def test_a_plain_read_reads_every_weight_file(tmp_path: Path) -> None:
    assert plain_read_s(tmp_path) >= 0.0
    for number in range(2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(1000))
    (tmp_path / "unreadable.bin").mkdir()
    assert plain_read_s(tmp_path) > 0.0


def test_the_memory_of_a_process_and_its_children_is_counted() -> None:
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", sleeper], stdin=subprocess.PIPE) as process:
        while len(found := pss_of(process.pid)) < 2:
            time.sleep(0.01)
        process.kill()
    assert all(each > 1_000_000 for each in found.values())
    text = report_up([UpResult(2.0, {"up": 3_000_000}), UpResult(1.5, {"up": 2_000_000})])
    assert "2 MB" in text
    assert "ready after 1.5 s" in text
