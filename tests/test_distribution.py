"""Wheel and sdist: built twice they are equal, and hold what an installation needs."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import tokenmesh
from tokenmesh.shared.services import SERVICE_BY_NAME

ROOT = Path(__file__).resolve().parent.parent
EPOCH = "1750000000"
pytestmark = pytest.mark.timeout(60)  # a build writes 7 MB of weights


def build(out: Path) -> None:
    """Run the command of `make dist`."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


def wheel_of(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


def test_two_builds_of_one_commit_are_equal(dist: Path, tmp_path: Path) -> None:
    build(tmp_path)
    first = {path.name: path.read_bytes() for path in dist.iterdir()}
    assert first == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    version = tokenmesh.__version__
    assert set(first) == {
        f"tokenmesh_server-{version}-py3-none-any.whl",
        f"tokenmesh_server-{version}.tar.gz",
    }


def test_the_wheel_has_all_files_of_the_package(dist: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "tokenmesh"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    with wheel_of(dist) as wheel:
        assert set(listed.stdout.split()) <= set(wheel.namelist())
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert b"tokenmesh = tokenmesh.__main__:main" in wheel.read(entry_points)


def test_the_wheel_installs_without_torch_unless_an_extra_wants_it(dist: Path) -> None:
    with wheel_of(dist) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        metadata = message_from_bytes(wheel.read(path))
    required = metadata.get_all("Requires-Dist", [])
    always = [each for each in required if "extra ==" not in each]
    heavy = ("torch", "triton", "transformers", "xgrammar", "fastapi")
    assert always
    assert [each for each in always if each.startswith(heavy)] == []
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {"cpu", "gpu", "dev", "gpu-tests", "embedded", "media", *SERVICE_BY_NAME}


def test_the_sdist_builds_the_package_and_has_no_tests(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2].partition("/")[0] for name in sdist.getnames()}
    assert {"pyproject.toml", "tokenmesh", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert not names & {"tests", "docs", "benchmarks", "compose"}
