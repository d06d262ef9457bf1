"""Where a model's files are, and whether it has a tower that we run. Needs no torch to say no."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenmesh.services.mm_encoder_svc.models.config_reader import ConfigReader, JsonObject
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import locate_model

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "*.safetensors*"


@dataclass(frozen=True, slots=True)
class TowerCheckpoint:
    """A checkpoint with a tower."""

    directory: Path
    config: JsonObject


def find_tower(model: str, revision: str | None) -> TowerCheckpoint | None:
    """The checkpoint, its weights downloaded if need be; None when it takes text only.

    Raises CheckpointError.
    """
    directory = locate_model(model, revision, _CONFIG)
    config = read_json(directory / _CONFIG)
    if not _has_tower(config, directory):
        return None
    return TowerCheckpoint(locate_model(model, revision, _CONFIG, _WEIGHTS), config)


def read_json(path: Path) -> JsonObject:
    """The object in a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no object")
    return value


def _has_tower(config: JsonObject, directory: Path) -> bool:
    if config.get("model_type") != "llava":
        return False
    vision = ConfigReader(config, str(directory / _CONFIG)).section("vision_config")
    return vision.text("model_type", "") == "clip_vision_model"
