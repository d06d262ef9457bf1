"""Models in the cache of this machine, and models that a mesh serves."""

import re
from pathlib import Path

import httpx
import huggingface_hub.constants
import pytest

from tests.unit.cli.test_mesh_commands import LOAD, STATE, process
from tokenmesh.cli import models as models_module
from tokenmesh.cli.api import GatewayClient
from tokenmesh.cli.main import MISUSE, run
from tokenmesh.cli.models import age, human_bytes


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with one model, as huggingface_hub lays it out."""
    folder = tmp_path / "hub"
    repo = folder / "models--acme--tiny"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    blob = repo / "blobs" / ("b" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"x" * 2048)
    (snapshot / "config.json").symlink_to(Path("../../blobs") / blob.name)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("a" * 40)
    (folder / "datasets--acme--words/snapshots").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(folder))
    return folder


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_cached_models_are_listed_and_deleted(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["list"]) == 0
    assert lines_of(capsys) == ["model size used", "acme/tiny 2.0 KiB just now"]
    assert run(["rm", "acme/other"]) == MISUSE
    assert "acme/other is not in the cache" in capsys.readouterr().err
    assert run(["rm", "-y", "acme/tiny"]) == 0
    assert "deleted acme/tiny, 2.0 KiB" in capsys.readouterr().out
    assert not (cache / "models--acme--tiny").exists()
    assert run(["list"]) == 0
    assert "tokenmesh pull" in capsys.readouterr().out


def test_what_is_deleted_must_be_confirmed(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.confirm", lambda text, abort: (_ for _ in ()).throw(SystemExit(1)))
    assert run(["rm", "acme/tiny"]) == 1
    assert (cache / "models--acme--tiny").exists()


def test_a_model_that_cannot_be_downloaded_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert run(["pull", "acme/nowhere"]) == MISUSE
    assert "acme/nowhere" in capsys.readouterr().err
    assert run(["pull", str(tmp_path)]) == MISUSE
    assert "already" in capsys.readouterr().err


def test_served_models_are_shown_with_their_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = process("worker-4", models=["qwen"], load=LOAD | {"sleeps_in_s": 240.4})
    state = STATE | {"processes": [*STATE["processes"], more]}  # type: ignore[misc]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=state))
    monkeypatch.setattr(models_module, "GatewayClient", lambda a, b: GatewayClient(a, b, transport))
    assert run(["ps"]) == 0
    assert lines_of(capsys) == [
        "model workers running waiting KV state",
        "llama 3 6 4 25% 1 asleep, 1 draining, 1 up",
        "qwen 1 3 2 25% 1 up, sleeps in 240 s",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_long_names_of_models_are_not_cut(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "/models/" + "a-long-name/" * 10 + "end"
    state = STATE | {"processes": [process("worker-1", models=[name], load=LOAD)]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=state))
    monkeypatch.setattr(models_module, "GatewayClient", lambda a, b: GatewayClient(a, b, transport))
    monkeypatch.setenv("COLUMNS", "80")
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
    assert run(["ps"]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    shown = "".join(line.split("  ")[0].strip() for line in lines[1:])
    assert name in shown
    assert (len(lines) == 2) is not is_terminal
    assert "1 up" in lines[1]


def test_sizes_and_ages_are_readable() -> None:
    sizes = (0, 1023, 1024, 150 << 20, 3 << 29)
    assert [human_bytes(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "150 MiB", "1.5 GiB",
    ]  # fmt: skip
    assert [age(seconds) for seconds in (5, 65, 7300, 200_000)] == [
        "just now", "1 minute ago", "2 hours ago", "2 days ago",
    ]  # fmt: skip
