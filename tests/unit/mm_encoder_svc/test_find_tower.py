"""A model without a tower costs nothing: torch is not even imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
from tokenmesh.shared.errors import CheckpointError

SCRIPT = """
import sys
from tokenmesh.services.mm_encoder_svc import main
from tokenmesh.services.mm_encoder_svc.checkpoint import find_tower
assert find_tower(sys.argv[1], None) is None
assert "torch" not in sys.modules
"""


def write(directory: Path, config: object) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def test_a_text_model_is_recognized_without_torch(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama"})
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True)


def test_a_llava_is_found_with_its_config(tmp_path: Path) -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    write(tmp_path, config)
    found = find_tower(str(tmp_path), None)
    assert found is not None
    assert (found.directory, found.config) == (tmp_path, config)


def test_only_a_model_with_a_tower_has_its_weights_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    write(tmp_path, {"model_type": "llama"})
    assert find_tower("someone/text", None) is None
    assert asked == [["config.json"]]
    write(tmp_path, {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}})
    assert find_tower("someone/llava", None) is not None
    assert "*.safetensors*" in asked[-1]


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_config_names_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find_tower(str(tmp_path), None)


def test_a_missing_model_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        find_tower(str(tmp_path), None)
    with pytest.raises(CheckpointError, match="no such directory, and it is not a hub id"):
        find_tower(str(tmp_path / "no" / "where"), None)
