"""Loading a tower: the vision tensors of a checkpoint, each exactly once, and nothing else."""

import json
import re
from pathlib import Path
from typing import Final

import torch
import xxhash
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn

from tokenmesh.services.mm_encoder_svc.models.config_reader import ConfigReader, JsonObject
from tokenmesh.services.mm_encoder_svc.models.llava import LlavaConfig, LlavaEncoder
from tokenmesh.services.mm_encoder_svc.tower import Tower
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import CheckpointError

_INDEX: Final = "model.safetensors.index.json"
_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PARTS: Final = ("vision_tower.", "multi_modal_projector.")
_DERIVED: Final = "vision_tower.embeddings.position_ids"
"""A buffer that old checkpoints stored."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


def load_tower(settings: ModelSettings, device: torch.device) -> Tower | None:
    """The model's tower, or None for a model that takes text only. Raises CheckpointError."""
    directory = _locate(settings.model, settings.revision)
    config = _read_json(directory / "config.json")
    if config.get("model_type") != "llava":
        return None
    reader = ConfigReader(config, str(directory / "config.json"))
    if reader.section("vision_config").text("model_type", "") != "clip_vision_model":
        return None
    llava = LlavaConfig.read(reader)
    with torch.device("meta"):
        model = LlavaEncoder(llava)
    dtype = _dtype(settings, config)
    fingerprint = _fill(model, directory, dtype)
    fingerprint.update(repr((llava, dtype)).encode())
    side = llava.tower.image_size
    return Tower(
        model.to(device).eval().requires_grad_(False),
        device=device,
        dtype=dtype,
        pixel_shape=(llava.tower.num_channels, side, side),
        tokens_per_item=llava.tokens_per_image,
        fingerprint=fingerprint.hexdigest(),
    )


def _locate(model: str, revision: str | None) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model} is no directory and no hub id", param="model")
    try:
        config = snapshot_download(model, revision=revision, allow_patterns=["config.json"])
        if _read_json(Path(config) / "config.json").get("model_type") != "llava":
            return Path(config)
        files = ["*.json", "*.safetensors"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is no directory, and as a hub id it cannot be fetched: {error}",
            param="model",
        ) from error


def _read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no object")
    return value


def _dtype(settings: ModelSettings, config: JsonObject) -> torch.dtype:
    stated = config.get("dtype") or config.get("torch_dtype")
    name = str(stated) if settings.dtype == "auto" else settings.dtype
    return _DTYPES.get(name, torch.float32)


def _fill(model: nn.Module, directory: Path, dtype: torch.dtype) -> xxhash.xxh3_128:
    """Load the module's tensors; returns the hash of their bytes, by name."""
    wanted = model.state_dict()
    found: dict[str, torch.Tensor] = {}
    for path in _shards(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    ours = _canonical(name)
                    if ours is not None:
                        _check(ours, tuple(file.get_slice(name).get_shape()), wanted, path)
                        found[ours] = file.get_tensor(name).to(dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{directory} lacks the vision tensors {', '.join(missing[:5])}")
    model.load_state_dict(found, strict=True, assign=True)
    digest = xxhash.xxh3_128()
    for name in sorted(found):
        digest.update(name.encode())
        digest.update(found[name].contiguous().view(torch.uint8).numpy().data)
    return digest


def _shards(directory: Path) -> list[Path]:
    """The files that hold vision tensors, or all where there is no index."""
    if (directory / _INDEX).is_file():
        names = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{directory / _INDEX} holds no weight_map")
        chosen = {str(file) for name, file in names.items() if _canonical(name) is not None}
        return sorted(directory / Path(file).name for file in chosen)
    single = directory / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(f"{directory} holds no model.safetensors and no index of shards")
    return [single]


def _canonical(name: str) -> str | None:
    """Our name of a tensor; None for one that is no part of the tower.

    transformers has renamed llava's parts twice: a leading `model.`, an inner `vision_model.`.
    """
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(_PARTS) and name != _DERIVED else None


def _check(name: str, shape: tuple[int, ...], wanted: dict[str, torch.Tensor], path: Path) -> None:
    if name not in wanted:
        raise CheckpointError(f"{path}: the tensor {name} is not known")
    expected = tuple(wanted[name].shape)
    if shape != expected:
        raise CheckpointError(f"{path}: the tensor {name} has shape {shape}, not {expected}")
