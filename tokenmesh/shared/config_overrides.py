"""Checkpoints whose config.json is read with other values, as `model.hf_overrides` has them.

Every service reads the same directory, so one with another config.json is made: links to the files
of the checkpoint, next to a merged config.json.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.errors import CheckpointError

_FOLDER: Final = "~/.cache/tokenmesh/overrides"
_CONFIG: Final = "config.json"


def overridden(directory: Path, overrides: Mapping[str, Any], folder: str = _FOLDER) -> Path:
    """The directory to read instead of a checkpoint's; its own where nothing is overridden.

    Blocks. Raises CheckpointError.
    """
    if not overrides:
        return directory
    directory = directory.resolve()
    try:
        stated = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        if not isinstance(stated, dict):
            raise CheckpointError(f"{directory}/{_CONFIG} does not hold a JSON object")
        text = json.dumps(merged(stated, overrides), indent=2, sort_keys=True)
        digest = hashlib.sha256(f"{directory}\0{text}".encode()).hexdigest()[:16]
        target = Path(folder).expanduser() / f"{directory.name}-{digest}"
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (target.parent / f"{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another service may be making it
            _link(directory, target)
            if not (target / _CONFIG).exists():
                _write(target / _CONFIG, text)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: hf_overrides cannot be applied: {error}", param="hf_overrides"
        ) from error
    return target


def merged(stated: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Objects are merged; any other value replaces the one that is stated."""
    result = dict(stated)
    for key, value in overrides.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        result[key] = value
    return result


def _link(directory: Path, target: Path) -> None:
    """Files may have been downloaded, and gone, since the last time."""
    for path in target.iterdir():
        if path.is_symlink() and not path.exists():
            path.unlink()
    for path in directory.iterdir():
        place = target / path.name
        if path.name != _CONFIG and not place.is_symlink():
            place.symlink_to(path)


def _write(path: Path, text: str) -> None:
    """Write a file in one step, as another process reads it without the lock."""
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(scratch).replace(path)
