"""Tests of CI: what it runs, and what it may leave out."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repeated import COLLECTED, REPEATED

ROOT = Path(__file__).resolve().parent.parent
REAL = ["real-models", "test-real"]
LONG_RUN = re.compile(r"pytest\.mark\.slow|@rounds\(|@counts\(|@some\(")


def kernel_inputs(folder: Path) -> str:
    command = [ROOT / ".ci/kernel_inputs", folder]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenmesh/kernels/op/triton.py", "x = 2\n"),
        ("tokenmesh/kernels/op/new.py", ""),
        ("tests/kernels/test_op.py", "x = 2\n"),
        ("pyproject.toml", '"triton>=3.7"\n'),
        ("Makefile", "pip install 'triton==3.7.*'\n"),
    ],
)
def test_the_kernels_are_tested_again_when_they_change(
    file: str, text: str, tmp_path: Path
) -> None:
    before = {
        "tokenmesh/kernels/op/triton.py": "x = 1\n",
        "tests/kernels/test_op.py": "x = 1\n",
        "pyproject.toml": '"triton>=3.6"\n',
        "Makefile": "pip install 'triton==3.6.*'\n",
    }
    for name, content in before.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    digest = kernel_inputs(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{64}\n", digest)
    # neither do kernels in C count
    (tmp_path / "tokenmesh/kernels/native").mkdir()
    (tmp_path / "tokenmesh/kernels/native/build.py").write_text("x = 1")
    (tmp_path / "README.md").write_text("changed")
    assert kernel_inputs(tmp_path) == digest
    (tmp_path / file).write_text(text)
    assert kernel_inputs(tmp_path) != digest


def test_every_file_with_a_long_run_is_listed_for_contributors() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if LONG_RUN.search(path.read_text("utf-8"))
    ]
    assert "tests/unit/worker_svc/test_engine_schedules.py" in found
    assert [name for name in found if f"`{name}`" not in page] == []
    listed = re.findall(r"^\| `(tests/[\w/]+\.py)`", page, re.M)
    assert [name for name in listed if name not in found] == []


def test_each_test_keeps_a_case_that_is_not_left_to_long_runs() -> None:
    """And each case that is left to them is there, in the files that this run has collected."""
    wrong = []
    for file, cases in COLLECTED.items():
        names = REPEATED[file]
        kept = {name.partition("[")[0] for name in cases - names}
        wrong += [name for name in names if name not in cases or name.partition("[")[0] not in kept]
    assert wrong == []


HOOKS = (
    "from tests.again import (pytest_collectreport, pytest_runtest_logreport,"
    " pytest_sessionfinish, pytest_sessionstart)\n"
)
FLAKY = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("text", ["a", "b c::d[e]"])
def test_flaky(text, tmp_path):
    tried = Path(f"tried-{ord(text[0])}")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried


def test_sound():
    pass
"""
BAD = "def test_bad():\n    assert False\n"


def in_project(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("source", "again", "said"),
    [
        pytest.param(
            FLAKY,
            True,
            "passed on the second try: test_it.py::test_flaky[b c::d[e]]\n",
            id="flaky",
        ),
        pytest.param(FLAKY + BAD, False, "1 failed, 2 passed", id="bad"),
        pytest.param(
            "".join(BAD.replace("bad", f"bad{n}") for n in range(6)),
            False,
            "no test is run again: 6 failed, more than 5",
            id="many",
        ),
        pytest.param(FLAKY + "1 / 0\n", False, "no test is run again", id="not collected"),
        pytest.param(
            FLAKY + "def test_stop():\n    raise KeyboardInterrupt\n",
            False,
            "no test is run again",
            id="interrupted",
        ),
    ],
)
def test_few_tests_that_fail_are_run_once_more(
    source: str, again: bool, said: str, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(HOOKS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(source)
    parallel = ("-p", "xdist", "-n", "2", "--dist", "worksteal") if again else ()
    first = in_project(tmp_path, "pytest", *parallel)
    assert first.returncode, first.stdout
    second = in_project(tmp_path, "tests.again")
    assert (second.returncode == 0) is again, second.stdout
    assert said in second.stdout
    assert second.stdout.count("second try: ") == 2 * again


def test_nothing_is_run_again_where_nothing_has_run(tmp_path: Path) -> None:
    assert in_project(tmp_path, "tests.again").returncode == 1


@pytest.mark.parametrize(
    ("failing", "status", "targets"),
    [
        ((), 0, ["check", "test", "test-kernels", *REAL]),
        (("test",), 0, ["check", "test", "test-failed", "test-kernels", *REAL]),
        (("real-models",), 0, ["check", "test", "test-kernels", REAL[0]]),
        (("test-real",), 2, ["check", "test", "test-kernels", *REAL]),
        (("test", "test-failed"), 2, ["check", "test", "test-failed"]),
        (("check",), 2, ["check"]),
    ],
)
def test_ci_tries_failed_tests_again_and_real_models_where_it_can(
    failing: tuple[str, ...], status: int, targets: list[str], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / ".ci/kernel_inputs").write_text("#!/bin/sh\necho other\n")
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    checks = "".join(f'[ "$1" != {each} ] || exit 2\n' for each in failing)
    make.write_text(f'#!/bin/sh\necho "$1"\n{checks}')
    make.chmod(0o755)
    environment = os.environ | {"PATH": f"{make.parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [tmp_path / ".ci/run"], env=environment, capture_output=True, text=True, timeout=20
    )
    assert (ran.returncode, ran.stdout.split()) == (status, targets)
