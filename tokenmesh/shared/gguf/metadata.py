"""Values of a GGUF file's metadata, checked; their keys begin with the architecture."""

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf.reader import GgufFile


def integer(file: GgufFile, key: str, fallback: int | None = None) -> int:
    whole, value = _looked_up(file, key, fallback)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise error(file, f"{whole} is {value!r}, not a whole number above 0")
    return value


def number(file: GgufFile, key: str, fallback: float | None = None) -> float:
    whole, value = _looked_up(file, key, fallback)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise error(file, f"{whole} is {value!r}, not a number above 0")
    return float(value)


def _looked_up(file: GgufFile, key: str, fallback: object) -> tuple[str, object]:
    whole = f"{file.values['general.architecture']}.{key}"
    value = file.values.get(whole)
    return whole, fallback if value is None else value


def error(file: GgufFile, problem: str) -> CheckpointError:
    """An error that names the file."""
    return CheckpointError(f"{file.path}: {problem}", param="model")
