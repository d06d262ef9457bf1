"""Tower: a vision encoder, loaded from the vision tensors of a checkpoint, each exactly once."""

import sys
from pathlib import Path
from typing import Final

import torch
import xxhash
from torch import nn

from tokenmesh.services.mm_encoder_svc.checkpoint import ConfigReader, JsonObject, TowerCheckpoint
from tokenmesh.services.mm_encoder_svc.models.llava import LlavaConfig, LlavaEncoder
from tokenmesh.shared.config.model import Dtype, EncoderSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError, ProtocolError
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tensor_file import TensorFile, TensorShards

# Tensor blobs are little-endian; torch uses the byte order of the host.
assert sys.byteorder == "little"

_PIXELS: Final = "float32"
_DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Tower:
    """One model's encoder on one device. Its methods block; call them from one thread."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pixel_shape: tuple[int, ...],
        tokens_per_item: int,
        fingerprint: str,
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self.pixel_shape = pixel_shape
        self.tokens_per_item = tokens_per_item
        self.fingerprint = fingerprint
        """Changes with every weight and setting that changes an embedding."""

    def check(self, pixels: TensorBlob) -> None:
        """Raise ProtocolError for pixels of another type or shape."""
        if pixels.dtype != _PIXELS or pixels.shape != self.pixel_shape:
            raise ProtocolError(
                f"pixels are {pixels.dtype}{list(pixels.shape)}, the tower needs "
                f"{_PIXELS}{list(self.pixel_shape)}"
            )

    def encode(self, batch: list[TensorBlob]) -> list[TensorBlob]:
        """Embeddings [tokens_per_item, hidden] of each, in one forward pass."""
        # frombuffer needs writable memory; the copy also frees the message behind the view.
        images = [
            torch.frombuffer(bytearray(pixels.data), dtype=torch.float32).view(pixels.shape)
            for pixels in batch
        ]
        with torch.inference_mode():
            stacked = torch.stack(images).to(device=self._device, dtype=self._dtype)
            embeddings = self._model(stacked).cpu().contiguous()
        return [
            TensorBlob(
                dtype=_DTYPE_NAMES[self._dtype],
                shape=tuple(one.shape),
                data=one.view(torch.uint8).numpy().tobytes(),
            )
            for one in embeddings
        ]


_PARTS: Final = ("vision_tower.", "multi_modal_projector.")
_DERIVED: Final = "vision_tower.embeddings.position_ids"
"""A buffer in old checkpoints, which is not loaded."""

_STORED: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}


def load_tower(found: TowerCheckpoint, dtype: Dtype, limits: EncoderSettings) -> Tower:
    """Load it onto the configured device; blocks. Raises CheckpointError, ConfigError."""
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
    has_gpu = limits.device != "cpu" and torch.cuda.is_available()
    if limits.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no GPU", param="encoder.device")
    return torch.device("cuda" if has_gpu else "cpu")


def _dtype(setting: Dtype, config: JsonObject) -> torch.dtype:
    stated = config.get("dtype") or config.get("torch_dtype")
    name = str(stated) if setting == "auto" else setting
    return _DTYPES.get(name, torch.float32)


def _fill(model: nn.Module, directory: Path, dtype: torch.dtype) -> xxhash.xxh3_128:
    """Load the module's tensors; returns the hash of their names and bytes."""
    wanted = model.state_dict()
    found: dict[str, torch.Tensor] = {}
    shards = TensorShards(directory, lambda name: _canonical(name) is not None)
    for name in shards:
        ours = _canonical(name)
        if ours is not None:
            file = shards.file_of(name)
            _check(ours, file[name].shape, wanted, file.path)
            found[ours] = _read(file, name).to(dtype)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{directory} lacks the vision tensors {', '.join(missing[:5])}")
    model.load_state_dict(found, strict=True, assign=True)
    digest = xxhash.xxh3_128()
    for name in sorted(found):
        digest.update(name.encode())
        digest.update(found[name].contiguous().view(torch.uint8).numpy().data)
    return digest


def _read(file: TensorFile, name: str) -> torch.Tensor:
    """Read one tensor. Raises CheckpointError."""
    entry = file[name]
    stored = _STORED.get(entry.dtype)
    if stored is None:
        raise CheckpointError(
            f"{file.path}: tensor {name} has type {entry.dtype}; supported are {', '.join(_STORED)}"
        )
    tensor = torch.empty(entry.shape, dtype=stored)
    file.read_into(name, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _canonical(name: str) -> str | None:
    """The module's name of a tensor; None if it is not part of the tower.

    transformers renamed llava's parts twice: with a leading `model.` and an inner `vision_model.`.
    """
    name = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(_PARTS) and name != _DERIVED else None


def _check(name: str, shape: tuple[int, ...], wanted: dict[str, torch.Tensor], path: Path) -> None:
    if name not in wanted:
        raise CheckpointError(f"{path}: unknown tensor {name}")
    expected = tuple(wanted[name].shape)
    if shape != expected:
        raise CheckpointError(f"{path}: the tensor {name} has shape {shape}, not {expected}")
