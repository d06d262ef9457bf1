"""A model's files without its weights: where they are and what the JSON ones say."""

import json
from pathlib import Path
from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import locate_model

_HUB_FILES: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def checkpoint_dir(model: str, revision: str | None) -> Path:
    """The local directory of a checkpoint; a hub id is downloaded first, its weights left out.

    Raises CheckpointError.
    """
    return locate_model(model, revision, *_HUB_FILES)


def check_has_tokenizer(directory: Path) -> None:
    """Raise CheckpointError, naming the files that would do, for a directory without tokenizer."""
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return
    if any(directory.glob("*.tiktoken")):
        return
    raise CheckpointError(
        f"{directory} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)} is there"
    )


def read_json(path: Path) -> JsonObject:
    """The object in a file; empty when there is no such file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no object")
    return value


def text_config(config: JsonObject) -> JsonObject:
    """The language model's part of a config.json."""
    nested = config.get("text_config") or config.get("llm_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def positive_int(value: object) -> int | None:
    """`value` if it is a positive integer."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return value if is_int and isinstance(value, int) and value > 0 else None
