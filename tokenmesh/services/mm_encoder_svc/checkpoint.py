"""Where a model's files are, and whether it has a tower that we run. Needs no torch to say no."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tokenmesh.services.mm_encoder_svc.models.config_reader import ConfigReader, JsonObject
from tokenmesh.shared.errors import CheckpointError

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
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
    directory = _locate(model, revision, _CONFIG)
    config = read_json(directory / _CONFIG)
    if not _has_tower(config, directory):
        return None
    return TowerCheckpoint(_locate(model, revision, _CONFIG, _WEIGHTS), config)


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


def _locate(model: str, revision: str | None, *files: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is no directory and no hub id", param="model")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is no directory, and as a hub id it cannot be fetched: {error}",
            param="model",
        ) from error
