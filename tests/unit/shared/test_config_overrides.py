"""hf_overrides: every service reads one directory whose config.json has the operator's values."""

import json
from pathlib import Path

import pytest

from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.pooling.kind import read_pooling
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.services.tokenizer_svc.loading import load_model
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config_overrides import overridden
from tokenmesh.shared.errors import CheckpointError

CONFIG = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and a cache of the test's own."""
    monkeypatch.setattr(overridden, "__defaults__", (str(tmp_path / "cache"),))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, "part": {"a": 1, "b": 2}}))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_objects_are_merged_and_other_files_are_those_of_the_checkpoint(checkpoint: Path) -> None:
    found = overridden(checkpoint, {"hidden_size": 16, "part": {"b": None, "c": 3}})
    config = json.loads((found / "config.json").read_text())
    assert config == {**CONFIG, "hidden_size": 16, "part": {"a": 1, "b": None, "c": 3}}
    assert (found / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((checkpoint / "config.json").read_text())["hidden_size"] == 8
    assert overridden(checkpoint, {}) == checkpoint


def test_files_that_come_and_go_later_are_seen(checkpoint: Path) -> None:
    """The hub's files arrive service by service."""
    found = overridden(checkpoint, {"hidden_size": 16})
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    assert overridden(checkpoint, {"hidden_size": 16}) == found
    names = {"config.json", "model-1.safetensors", "tokenizer.json"}
    assert {path.name for path in found.iterdir()} == names
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    assert overridden(checkpoint, {"hidden_size": 16}) != found


def test_a_config_that_cannot_be_read_is_an_error(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="does not hold a JSON object"):
        overridden(checkpoint, {"a": 1})
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="hf_overrides cannot be applied"):
        overridden(checkpoint, {"a": 1})


def test_worker_tokenizer_and_encoder_read_the_same(checkpoint: Path) -> None:
    byte_level_bpe(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    over = {"matryoshka_dimensions": [4], "vision_config": {"x": 1}, "max_position_embeddings": 99}
    model = ModelSettings(model=str(checkpoint), hf_overrides=over, runner="pooling")
    directory = locate(model)
    facts = read_pooling(model, read_config(directory), directory)
    assert facts.dimensions == (4,)
    tower = find_tower(model.model, None, model.hf_overrides)
    assert tower is not None
    assert tower.directory == load_model(model).directory == directory
    assert load_model(model).max_model_len == 99
