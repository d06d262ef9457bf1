"""RawConfig: config.json with defaults, read key by key, each error naming the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmesh.shared.errors import CheckpointError


class RawConfig:
    """A JSON object and where it came from. Null counts as missing."""

    def __init__(
        self, values: Mapping[str, Any], origin: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = values
        self.origin = origin
        self.read: set[str] = set()
        """Keys that were read."""
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> "RawConfig":
        """The same object, with values for keys that it lacks altogether."""
        other = RawConfig(self.values, self.origin, defaults)
        other.read = self.read
        return other

    def get(self, key: str) -> Any:
        """The value, the family's default when the key is absent, or None."""
        self.read.add(key)
        return self.values[key] if key in self.values else self._defaults.get(key)

    def default(self, key: str) -> Any:
        """The family's default, regardless of the file."""
        return self._defaults.get(key)

    def key_of(self, value: object) -> str | None:
        """The first key that has a string, `outer: inner` where it is nested; or None."""
        for key, found in self.values.items():
            if isinstance(found, str) and found == value:
                return key
            if isinstance(found, Mapping) and (inner := RawConfig(found, key).key_of(value)):
                return f"{key}: {inner}"
        return None

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error that names the file and the key."""
        return CheckpointError(f"{self.origin}: {key} {problem}", param=key)

    def integer(self, key: str, fallback: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; `fallback` when there is none."""
        value = self.get(key)
        value = fallback if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"is {value!r}, not a whole number of at least {minimum}")
        return value

    def number(self, key: str, fallback: float | None = None) -> float:
        """A finite number; `fallback` when there is none."""
        value = self.get(key)
        value = fallback if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
            raise self.error(key, f"is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, fallback: bool = False) -> bool:
        """True or false; `fallback` when there is none."""
        value = self.get(key)
        value = fallback if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not true or false")
        return value

    def part(self, key: str) -> "RawConfig | None":
        """A nested object, the family's default when there is none, or None."""
        value = self.get(key)
        value = self.default(key) if value is None else value
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "is not an object")
        return RawConfig(value, f"{self.origin}: {key}")

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """A list of exactly `length` entries, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"is not a list of {length} entries")
        return value


def read_json(path: Path) -> RawConfig:
    """Read a JSON object. Raises CheckpointError that names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is no valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return RawConfig(values, str(path))
