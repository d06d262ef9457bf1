"""Where a model's files are: a local directory, or a snapshot from the hub."""

import re
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tokenmesh.shared.errors import CheckpointError

FILES: Final = ("config.json", "generation_config.json", "model*.safetensors*")
"""All that the worker reads of a repository."""
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def locate(model: str, revision: str | None) -> Path:
    """The directory that holds the model, downloaded if need be. Raises CheckpointError."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").exists():
            raise CheckpointError(f"{directory}: holds no config.json, so it is no model")
        return directory
    if directory.exists():
        raise CheckpointError(f"{model}: is a file; a model is a directory or a hub id")
    if _HUB_ID.fullmatch(model) is None or model.startswith("."):
        raise CheckpointError(f"{model}: there is no such directory, and it is no hub id")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(FILES)))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no such directory, not in the local hub cache, and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{model}: cannot be fetched from the hub: {error}") from error
