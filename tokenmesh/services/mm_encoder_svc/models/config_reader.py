"""ConfigReader: typed values out of a config.json, with errors that name the key."""

from typing import Final

from tokenmesh.shared.errors import CheckpointError

JsonObject = dict[str, object]

_MAX_SIZE: Final = 1 << 24
"""No size in a tower's config comes near it; a larger one would only exhaust memory."""


class ConfigReader:
    """One object of a config.json; `where` names it in errors."""

    def __init__(self, values: JsonObject, where: str) -> None:
        self._values = values
        self._where = where

    def section(self, name: str) -> "ConfigReader":
        """A nested object."""
        value = self._values.get(name)
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._where}: {name} is missing or no object")
        return ConfigReader(value, f"{self._where}: {name}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
            raise CheckpointError(f"{self._where}: {name} is no positive size: {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A float."""
        value = self._values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self._where}: {name} is no number: {value!r}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._values.get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._where}: {name} is no string: {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
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
            raise CheckpointError(f"{self._where}: {name} is no layer or list of layers: {value!r}")
        return found
