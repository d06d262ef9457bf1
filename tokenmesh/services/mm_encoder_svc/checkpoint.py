"""Finds a model's files and whether it has a tower; works without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.config_overrides import overridden
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import locate_model, served_part

JsonObject = dict[str, object]

_CONFIG: Final = "config.json"
_WEIGHTS: Final = "*.safetensors*"
_ENCODER_DECODERS: Final = ("whisper",)
_TOWERS: Final = ("vision_config", "audio_config")


@dataclass(frozen=True, slots=True)
class TowerCheckpoint:
    directory: Path
    config: JsonObject
    """config.json of what is served."""


def find_tower(
    model: str, revision: str | None, overrides: Mapping[str, Any] | None = None
) -> TowerCheckpoint | None:
    """The checkpoint, with its weights downloaded; None for a model that accepts text only.

    `overrides`: `model.hf_overrides`. Raises CheckpointError.
    """
    directory = overridden(locate_model(model, revision, _CONFIG), overrides or {})
    config = served_part(read_json(directory / _CONFIG))
    if not _has_tower(config):
        return None
    whole = locate_model(model, revision, _CONFIG, _WEIGHTS)
    return TowerCheckpoint(overridden(whole, overrides or {}), config)


def read_json(path: Path) -> JsonObject:
    """The object in a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _has_tower(config: JsonObject) -> bool:
    """Return whether it describes an encoder of media next to a language model."""
    inner = config.get("vlm_config")
    inner = inner if isinstance(inner, dict) else config
    has_part = any(isinstance(inner.get(name), dict) for name in _TOWERS)
    return has_part or config.get("model_type") in _ENCODER_DECODERS
