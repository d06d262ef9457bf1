"""The interpreter of a new environment: found, checked, and replaced when another one is named."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
MAKE_VENV = ROOT / "scripts/make_venv.sh"


def test_every_place_names_the_same_versions_of_python() -> None:
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    for minor in range(9, 17):
        is_allowed = f"3.{minor}.0" in SpecifierSet(PROJECT["requires-python"])
        assert is_allowed == (f"3.{minor}" in supported)
    script = MAKE_VENV.read_text("utf-8")
    assert re.findall(r"python(3\.\d+)", script.partition("candidates=(")[2].partition(")")[0]) == (
        supported
    )
    *most, last = supported
    for page in ("README.md", "docs/guides/serve-a-model.md", "docs/limits.md"):
        text = (ROOT / page).read_text("utf-8")
        assert re.search(rf"Python {', '.join(most)},? (?:or|and) {last}", text), page


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder for interpreters; the only place besides the system's where commands are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def add_python(path: Path, name: str, pretend: str = "") -> None:
    """This interpreter under another name, after the statements of `pretend`."""
    folder = path.parent / f"site-{name}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\n{pretend}\n")
    # pip is what takes most of the time of making an environment
    add_program(
        path,
        name,
        f'export PYTHONPATH={folder}\n[ "$1" != -m ] || set -- "$@" --without-pip\n'
        f'exec {sys.executable} "$@"',
    )


def add_program(path: Path, name: str, script: str) -> None:
    program = path / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def make_venv(path: Path, python: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MAKE_VENV, path.parent / "venv", python],
        env={"PATH": f"{path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=15,
    )


def test_an_interpreter_that_exists_and_fails_is_skipped(path: Path) -> None:
    add_program(path, "python3.11", "echo 'command not found' >&2; exit 127")
    add_python(path, "python3.12", "sys.version_info = (3, 9, 18)")
    add_python(path, "python3.13", "sys.base_prefix = '/chosen'")
    result = make_venv(path)
    assert result.returncode == 0, result.stderr
    assert (path.parent / "venv/.python").read_text().startswith("/chosen ")


def test_an_interpreter_that_cannot_be_used_is_named_with_the_reason(path: Path) -> None:
    add_python(path, "old", "sys.version_info = (3, 10, 1)")
    result = make_venv(path, "old")
    assert result.returncode == 1
    assert "old: Python 3.10 is not supported" in result.stderr
    assert "make install PYTHON=" in result.stderr
    assert "absent: not found" in make_venv(path, "absent").stderr
    assert not (path.parent / "venv").exists()


def test_an_environment_is_kept_until_another_interpreter_is_named(path: Path) -> None:
    add_python(path, "python3.11")
    add_python(path, "other", "sys.base_prefix = '/other'")
    mark = path.parent / "venv/installed"
    assert make_venv(path).returncode == 0
    mark.touch()
    for python in ("", "python3.11"):
        assert make_venv(path, python).returncode == 0
        assert mark.exists()
    assert make_venv(path, "other").returncode == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("model", "code", "shown"),
    [
        ("smollm2", 0, "pull smollm2"),
        ("smollm2", 2, "pull smollm2\nsmollm2 was not downloaded"),
        ("", 2, ""),
    ],
)
def test_an_installation_also_downloads_a_model_where_it_can(
    model: str, code: int, shown: str, tmp_path: Path
) -> None:
    command = tmp_path / "bin/tokenmesh"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    command.chmod(0o755)
    # `make test` itself would make it print the directory, too
    words = ["make", "--no-print-directory", "-n", "install", f"VENV={tmp_path}", f"MODEL={model}"]
    recipe = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # what `make` would run after the libraries are installed
    last = recipe[recipe.index('[ -z "') :]
    done = subprocess.run(["sh", "-c", last], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(shown)
    assert bool(done.stdout) == bool(shown)
