"""Where a model is: a local directory, or a snapshot from the hub. Needs huggingface_hub."""

import re
from pathlib import Path
from typing import Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf import is_gguf, unpacked

SERVED_FILES: Final = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"),
    "*.safetensors*",
)
"""What all services together read of a model in the hub."""
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def locate_model(model: str, revision: str | None, *patterns: str) -> Path:
    """The local directory of `model`; of a hub id only the files of `patterns` are downloaded.

    A GGUF file is unpacked into a directory of the user's cache.

    Blocks. Raises CheckpointError with the reason.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if is_gguf(directory):
        return unpacked(directory)
    if directory.exists():
        what = "a model is a directory, a GGUF file (.gguf) or a hub id"
        raise CheckpointError(f"{model}: is a file; {what}", param="model")
    if _HUB_ID.fullmatch(model) is None or model.startswith("."):
        raise CheckpointError(
            f"{model}: there is no such directory, and it is not a hub id", param="model"
        )
    # slow imports, which short-lived processes must not wait for
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no such directory, not in the hub cache, and the hub cannot be reached",
            param="model",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{model}: cannot be fetched from the hub: {error}", param="model"
        ) from error
