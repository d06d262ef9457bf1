"""A short `benchmarks.chaos`: real processes die and freeze, and no client sees it."""

import json
from pathlib import Path

import pytest

from benchmarks import chaos

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]


def test_no_stream_suffers_from_what_befalls_the_processes(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    few = ["--faults", "6", "--streams", "40", "--interval", "0.5", "--concurrency", "4"]
    exit_code = chaos.main([*few, "--seed", "3", "--out", str(out), "--logs", str(tmp_path)])
    found = json.loads(out.read_text())
    assert (found["failures"], found["leaks"], exit_code) == ({}, [], 0)
    assert found["faults"] == 6
    assert found["streams"] >= 40
    assert found["account_differences"] == []
    assert sum(each["completion_tokens"] for each in found["accounts"].values()) > 1000
