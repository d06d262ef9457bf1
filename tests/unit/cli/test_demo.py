"""The models of `tokenmesh up` without an argument, by the name of one, and with `--demo`."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.fakes.pages import ROOT
from tokenmesh.cli import demo
from tokenmesh.cli.demo import default_model, hint, name_demo, pull_missing
from tokenmesh.shared.catalog import BUILT_IN, CATALOG, DEFAULT, CatalogModel
from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.config.loader import DEMO_MODEL
from tokenmesh.shared.errors import CheckpointError, ConfigError
from tokenmesh.shared.model_files import locate_model


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def put(name: str) -> CatalogModel:
    """A model of the catalog as if it had been pulled."""
    model = CATALOG[name]
    model.folder.mkdir(parents=True)
    (model.folder / model.file).touch()
    return model


def settings_of(names: list[str]) -> Settings:
    return load_settings(overrides={"models": [{"model": name} for name in names]})


def test_the_real_model_is_the_default_where_it_was_pulled() -> None:
    (built_in,) = load_settings(None, None, default_model()).models
    assert (built_in.model, built_in.name) == (str(DEMO_MODEL), BUILT_IN)
    assert "tokenmesh pull smollm2" in str(hint([built_in]))
    pulled = put(DEFAULT)
    (model,) = load_settings(None, None, default_model()).models
    assert model.model == str(pulled.checkpoint)
    assert model.served_model_name == ("smollm2", "SmolLM2-135M-Instruct")
    assert hint([model]) is None


def test_programs_that_do_not_ask_for_the_default_keep_the_built_in_model() -> None:
    put(DEFAULT)
    assert load_settings().models[0].name == BUILT_IN
    assert load_settings(overrides={"model": {"model": BUILT_IN}}).models[0].model == str(
        DEMO_MODEL
    )


def test_sampling_of_the_card_lies_below_what_the_settings_say() -> None:
    put(DEFAULT)

    def sampling(**fields: Any) -> dict[str, Any]:
        overrides = {"model": {"model": DEFAULT, **fields}}
        return load_settings(overrides=overrides).models[0].override_generation_config

    assert sampling() == {"temperature": 0.2, "top_p": 0.9}
    mixed = sampling(override_generation_config={"top_p": 0.5, "top_k": 3})
    assert mixed == {"temperature": 0.2, "top_p": 0.5, "top_k": 3}
    assert sampling(generation_config="vllm") == {}


def test_a_model_of_the_catalog_that_is_not_here_is_explained_by_every_service() -> None:
    (model,) = load_settings(overrides={"model": {"model": "minilm"}}).models
    with pytest.raises(CheckpointError, match="`tokenmesh pull minilm` downloads it"):
        locate_model(model.model, None)


def test_a_local_path_comes_before_the_name_of_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    assert load_settings(overrides={"model": {"model": "minilm"}}).models[0].name == "minilm"
    assert locate_model("minilm", None) == Path("minilm")


def test_up_pulls_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(demo, "pull_model", lambda model, _: pulled.append(model.name))
    put("minilm")
    models = settings_of(["smollm2", "minilm", "/some/where", "whisper-tiny"]).models
    assert pull_missing(models, Console(quiet=True))
    assert pulled == ["smollm2", "whisper-tiny"]
    with pytest.raises(ConfigError, match="--accept-terms"):
        pull_missing(settings_of(["gemma3-270m"]).models, Console(quiet=True))


def test_the_demos_name_models_of_the_catalog() -> None:
    def served(name: str) -> list[str]:
        overrides: dict[str, Any] = {}
        name_demo(overrides, name)
        return [model.name for model in load_settings(overrides=overrides).models]

    assert served("chat") == [BUILT_IN]
    assert served("embeddings") == ["minilm"]
    assert served("transcription") == ["whisper-base"]
    assert served("all") == ["smollm2", "minilm", "whisper-base"]


@pytest.mark.parametrize("name", ["chat", "embeddings", "transcription", "all"])
@pytest.mark.parametrize("given", [{"model": {"model": "m"}}, {"models": [{"model": "m"}]}])
def test_a_demo_and_a_model_are_too_many(name: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="another model"):
        name_demo(given, name)


def test_an_unknown_demo_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of chat, embeddings, transcription, all"):
        name_demo({}, "video")


def test_the_page_lists_the_models_of_the_catalog() -> None:
    page = (ROOT / "docs/models.md").read_text("utf-8")
    for model in CATALOG.values():
        megabytes = (f"{round(each / 1e6)} MB" for each in (model.download_bytes, model.num_bytes))
        row = [f"| `{model.name}` | `{model.full_name}` |", *megabytes, f"| {model.licence} |"]
        (line,) = [line for line in page.splitlines() if line.startswith(row[0])]
        assert [part for part in row if part not in line] == []
