"""Where a model is: a local directory, or a snapshot from the hub. Needs huggingface_hub."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared import ctranslate2
from tokenmesh.shared.catalog import CATALOG
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.gguf import is_gguf, unpacked

SERVED_FILES: Final = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"),
    "*.safetensors*",
)
"""The files of a model in the hub that some service reads."""
_CONFIG: Final = "config.json"
_THINKERS: Final = {
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""By the model type of an omni model: transformers' class of the part that reads media and writes
text. The part that speaks, the talker, is not served."""
_OF_WHOLE: Final = ("dtype", "torch_dtype", "quantization_config")
"""Keys of config.json that hold for all parts of a model."""
_SENTENCE_CONFIGS: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""All but the first are of older releases of sentence-transformers, which searches in this
order."""
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def is_omni(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model with a talker, which is not served."""
    return config.get("model_type") in _THINKERS


def served_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of what is served: of an omni model its thinker, else all of it.

    Raises CheckpointError.
    """
    if not is_omni(config):
        return dict(config)
    thinker = config.get("thinker_config")
    if not isinstance(thinker, dict):
        raise CheckpointError("config.json: thinker_config is missing", param="thinker_config")
    kind = str(config["model_type"])
    whole = {name: config[name] for name in _OF_WHOLE if config.get(name) is not None}
    stated = {"architectures": [_THINKERS[kind]], "model_type": f"{kind}_thinker"}
    return {**whole, **thinker, **stated}


def sentence_config_path(directory: Path) -> Path | None:
    """Where sentence-transformers keeps a model's longest text and whether texts are lowered."""
    paths = (directory / name for name in _SENTENCE_CONFIGS)
    return next((path for path in paths if path.exists()), None)


def is_hub_id(name: str) -> bool:
    """Return whether a name can only be that of a repository in the hub."""
    is_local = Path(name).expanduser().exists() or name.startswith(".")
    return not is_local and "/" in name and _HUB_ID.fullmatch(name) is not None


def locate_model(model: str, revision: str | None, *patterns: str) -> Path:
    """The local directory of `model`; of a hub id only the files of `patterns` are downloaded.

    A GGUF file, and a Whisper of CTranslate2, is unpacked into a directory of the user's cache.

    Blocks. Raises CheckpointError with the reason.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return _as_checkpoint(directory)
    if is_gguf(directory):
        return unpacked(directory)
    if directory.exists():
        what = "a model is a directory, a GGUF file (.gguf) or a hub id"
        raise CheckpointError(f"{model}: is a file; {what}", param="model")
    if model in CATALOG:
        what = f"{model} is not on this machine: `tokenmesh pull {model}` downloads it"
        raise CheckpointError(what, param="model")
    if _HUB_ID.fullmatch(model) is None or model.startswith("."):
        raise CheckpointError(
            f"{model}: there is no such directory, and it is not a hub id", param="model"
        )
    # CTranslate2's config.json shows that the weights are in another file
    fetched = _snapshot(model, revision, {_CONFIG, *patterns})
    if ctranslate2.is_whisper_config(fetched):
        fetched = _snapshot(model, revision, ctranslate2.FILES)
    return _as_checkpoint(fetched)


def _as_checkpoint(directory: Path) -> Path:
    is_other = ctranslate2.is_ctranslate2(directory)
    return ctranslate2.unpacked(directory) if is_other else directory


def _snapshot(model: str, revision: str | None, patterns: Iterable[str]) -> Path:
    # slow imports, which short-lived processes must not wait for
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=sorted(patterns)))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model}: no such directory, not in the hub cache, and the hub cannot be reached",
            param="model",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{model}: cannot be fetched from the hub: {error}", param="model"
        ) from error
