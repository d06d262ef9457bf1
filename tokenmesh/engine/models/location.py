"""Know which of a model's files the worker reads."""

from pathlib import Path
from typing import Final

from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config_overrides import overridden
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import locate_model

FILES: Final = (
    *("config.json", "generation_config.json", "hf_quant_config.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors"),
    "model*.safetensors*",
)
CODE_FILES: Final = ("*.py",)
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def locate(model: ModelSettings, *, with_code: bool = False) -> Path:
    """The directory that holds the model, downloaded if need be. Raises CheckpointError."""
    files = (*FILES, *(CODE_FILES if with_code else ()))
    directory = locate_model(model.model, model.revision, *files)
    if not (directory / "config.json").exists():
        raise CheckpointError(f"{directory}: is not a model: it holds no config.json")
    return overridden(directory, model.hf_overrides)


def locate_tokenizer_files(model: ModelSettings) -> Path:
    """The directory of the model's tokenizer, downloaded if need be. Raises CheckpointError."""
    is_own = model.tokenizer is None or model.tokenizer == model.model
    revision = model.revision if is_own else None
    return locate_model(model.tokenizer or model.model, revision, *TOKENIZER_FILES)


def locate_tokenizer(model: ModelSettings) -> Path:
    """The model's tokenizer.json, downloaded if need be. Raises CheckpointError."""
    directory = locate_tokenizer_files(model)
    file = directory / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(f"{directory} holds no tokenizer.json")
    return file
