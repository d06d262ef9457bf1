"""scripts/gpu_proof.py: what it keeps, what it repeats, and that its commands start."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_bars import idle_share
from scripts import gpu_proof
from scripts.gpu_proof import Step, main, read_json

JUNIT = """<testsuites><testsuite tests="2" failures="1" errors="0" skipped="0">
<testcase name="good"/><testcase name="bad"><failure message="no&#10;more"/></testcase>
</testsuite></testsuites>"""


def python(name: str, code: str, limit_s: float = 10.0, path: Path | None = None) -> Step:
    return Step(name, [sys.executable, "-c", code, str(path)], limit_s, read_json)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The result of four steps: one is fine, one fails, one hangs, one writes nothing."""
    write = "import sys; open(sys.argv[1], 'w').write('{\"number\": 3}')"

    def steps(file: Path, _dry: bool) -> list[Step]:
        return [
            python("fine", write, path=file),
            python("failing", f"{write}; sys.exit('out of luck')", path=file),
            python("hanging", "import time; time.sleep(60)", limit_s=0.5),
            python("silent", ""),
        ]

    monkeypatch.setattr(gpu_proof, "steps", steps)
    monkeypatch.setattr(gpu_proof, "machine", lambda: {"device": "none"})
    return tmp_path / "proof.json"


def results(out: Path) -> dict[str, Any]:
    return {each["name"]: each for each in json.loads(out.read_text())["results"]}


def test_a_step_that_fails_or_hangs_leaves_the_others_alone(out: Path) -> None:
    assert main(["--out", str(out)]) == 1
    found = results(out)
    assert [each["status"] for each in found.values()] == [
        "passed",
        "failed",
        "timed out",
        "failed",
    ]
    assert found["fine"]["numbers"] == found["failing"]["numbers"] == {"number": 3}
    assert "out of luck" in found["failing"]["tail"]
    assert "cannot be read" in found["silent"]["tail"]
    text = out.with_suffix(".md").read_text()
    assert "| fine | passed |" in text
    assert "## failing\n\n```\nout of luck" in text


def test_a_restart_goes_on_where_it_stopped(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(out), "--only", "fine"]) == 0
    before = results(out)["fine"]
    capsys.readouterr()
    main(["--out", str(out), "--only", "fine", "silent"])
    assert "fine" not in capsys.readouterr().out
    assert results(out)["fine"] == before
    main(["--out", str(out), "--only", "fine", "--again", "fine"])
    assert "fine: passed" in capsys.readouterr().out


def test_what_the_whole_limit_cuts_off_is_not_taken_for_done(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_proof, "_LEAST_S", 0.0)
    slow = python("slow", "import time; time.sleep(60)", limit_s=30.0)
    monkeypatch.setattr(gpu_proof, "steps", lambda _file, _dry: [slow])
    assert main(["--out", str(out), "--minutes", "0.01"]) == 1
    assert not out.exists()


def test_a_step_that_is_not_there_is_refused_by_name(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(out), "--only", "missing"])
    assert "no step is named 'missing'; they are failing, fine" in capsys.readouterr().err


def test_numbers_of_tests_come_from_their_report(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    found = gpu_proof.read_tests(path)
    assert found == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0, "failed": ["bad: no"]}


def test_every_file_with_tests_for_a_gpu_is_run() -> None:
    marker = "pytest.mark." + "gpu"
    paths = (gpu_proof.ROOT / "tests").rglob("test_*.py")
    marked = {str(p.relative_to(gpu_proof.ROOT)) for p in paths if marker in p.read_text("utf-8")}
    run = {part for step in gpu_proof.steps(Path("out"), False) for part in step.command}
    assert marked
    assert marked <= run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_starts_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    assert main(["--out", str(out), "--dry"]) == 0, out.with_suffix(".md").read_text()
    found = results(out)
    assert list(found) == [step.name for step in gpu_proof.steps(out, dry=True)]
    assert found["bars 0.6B"]["numbers"]["bars"][0]["measured"] > 0
    assert found["ops"]["numbers"]["lines"]
    assert "interpreter" in found["moe tiles"]["numbers"]


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 1.0),
        ([(0.0, 4.0)], 0.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(0.0, 3.0), (1.0, 2.0), (3.0, 4.0)], 0.0),
    ],
    ids=["nothing", "one", "a gap", "one within another"],
)
def test_time_between_kernels_counts_as_idle(
    spans: list[tuple[float, float]], share: float
) -> None:
    assert idle_share(spans) == pytest.approx(share)
