"""Values of a GGUF file's metadata, checked; their keys begin with the architecture."""

from collections.abc import Mapping
from typing import Any, Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf.reader import GgufFile

_HARMLESS: Final = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Keys that tensors tell as well, or that nothing depends on."""
_NEUTRAL: Final[Mapping[str, object]] = {
    "attention.causal": True,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
}
"""Values that change nothing, as 0, false and empty ones do."""


class GgufValues:
    """Values of the architecture; remembers which were asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.values.get("general.architecture")
        self._asked: set[str] = set()

    def get(self, key: str, fallback: Any = None) -> Any:
        """A value that all layers share, where the file has one for each."""
        self._asked.add(key)
        value = self.file.values.get(self._whole(key))
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        return fallback if value is None else value

    def integer(self, key: str, fallback: int | None = None) -> int:
        value = self.get(key, fallback)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.error(key, f"is {value!r}, not a whole number above 0")
        return value

    def number(self, key: str, fallback: float | None = None) -> float:
        value = self.get(key, fallback)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(key, f"is {value!r}, not a number above 0")
        return float(value)

    def each(self, key: str, layers: int) -> list[Any] | None:
        """A value for each layer, where the file has that."""
        self._asked.add(key)
        value = self.file.values.get(self._whole(key))
        if not isinstance(value, list):
            return None
        if len(value) != layers:
            raise self.error(key, f"has {len(value)} values for {layers} layers")
        return value

    def refuse_others(self) -> None:
        """Raises CheckpointError for a value that was not asked for and may change the result."""
        prefix = self._whole("")
        for whole, value in self.file.values.items():
            key = whole.removeprefix(prefix)
            if not whole.startswith(prefix) or key in self._asked or key in _HARMLESS:
                continue
            is_neutral = key in _NEUTRAL and value == _NEUTRAL[key]
            if not is_neutral and (value or key == "attention.causal"):
                raise self.error(key, f"is set ({_short(value)}), which is not supported")

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error that names the file and the key."""
        return error(self.file, f"{self._whole(key)} {problem}")

    def _whole(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def error(file: GgufFile, problem: str) -> CheckpointError:
    """An error that names the file."""
    return CheckpointError(f"{file.path}: {problem}", param="model")
