"""Finds a model's files and whether it has a supported tower; works without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import locate_model

JsonObject = dict[str, object]

_MAX_SIZE: Final = 1 << 24
"""Far above all sizes in a tower's config; a larger one would exhaust memory."""


class ConfigReader:
    """One object of a config.json; `where` names it in errors."""

    def __init__(self, values: JsonObject, where: str) -> None:
        self._values = values
        self._where = where

    def section(self, name: str) -> "ConfigReader":
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._where}: {name} is missing or not an object")
        return ConfigReader(value, f"{self._where}: {name}")

    def size(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise CheckpointError(f"{self._where}: {name} is not a positive size: {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self._where}: {name} is not a number: {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._where}: {name} is not a string: {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._where}: {name} is neither true nor false: {value!r}")
        return value

    def layers(self, name: str, default: int) -> list[int]:
        """An integer or a list of them."""
        value = self._values.get(name, default)
        given = value if isinstance(value, list) else [value]
        found = [layer for layer in given if isinstance(layer, int)]
        if not given or len(found) != len(given):
            raise CheckpointError(
                f"{self._where}: {name} is not a layer or a list of layers: {value!r}"
            )
        return found


_CONFIG: Final = "config.json"
_WEIGHTS: Final = "*.safetensors*"


@dataclass(frozen=True, slots=True)
class TowerCheckpoint:
    directory: Path
    config: JsonObject


def find_tower(model: str, revision: str | None) -> TowerCheckpoint | None:
    """The checkpoint, with its weights downloaded; None for a model that accepts text only.

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
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _has_tower(config: JsonObject, directory: Path) -> bool:
    if config.get("model_type") != "llava":
        return False
    vision = ConfigReader(config, str(directory / _CONFIG)).section("vision_config")
    return vision.text("model_type", "") == "clip_vision_model"
