"""Loading a tower: the vision tensors of a checkpoint, each exactly once, and nothing else."""

from pathlib import Path
from typing import Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import nn

from tokenmesh.services.mm_encoder_svc.checkpoint import TowerCheckpoint, read_json
from tokenmesh.services.mm_encoder_svc.models.config_reader import ConfigReader, JsonObject
from tokenmesh.services.mm_encoder_svc.models.llava import LlavaConfig, LlavaEncoder
from tokenmesh.services.mm_encoder_svc.tower import Tower
from tokenmesh.shared.config.encoder import EncoderSettings
from tokenmesh.shared.config.model import Dtype
from tokenmesh.shared.errors import CheckpointError

_INDEX: Final = "model.safetensors.index.json"
_PARTS: Final = ("vision_tower.", "multi_modal_projector.")
_DERIVED: Final = "vision_tower.embeddings.position_ids"
"""A buffer that old checkpoints stored."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


def load_tower(found: TowerCheckpoint, dtype: Dtype, limits: EncoderSettings) -> Tower:
    """Load it onto the configured device; blocks. Raises CheckpointError."""
    if limits.threads is not None:
        torch.set_num_threads(limits.threads)
    directory = found.directory
    config = LlavaConfig.read(ConfigReader(found.config, str(directory / "config.json")))
    with torch.device("meta"):
        model = LlavaEncoder(config)
    resolved = _dtype(dtype, found.config)
    fingerprint = _fill(model, directory, resolved)
    fingerprint.update(repr((config, resolved)).encode())
    device = _device(limits)
    side = config.tower.image_size
    return Tower(
        model.to(device).eval().requires_grad_(False),
        device=device,
        dtype=resolved,
        pixel_shape=(config.tower.num_channels, side, side),
        tokens_per_item=config.tokens_per_image,
        fingerprint=fingerprint.hexdigest(),
    )


def _device(limits: EncoderSettings) -> torch.device:
    if limits.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(limits.device)


def _dtype(asked: Dtype, config: JsonObject) -> torch.dtype:
    stated = config.get("dtype") or config.get("torch_dtype")
    name = str(stated) if asked == "auto" else asked
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
        names = read_json(directory / _INDEX).get("weight_map")
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
