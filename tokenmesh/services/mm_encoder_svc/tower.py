"""Tower: the encoders of a checkpoint, as transformers computes them, without its language model.

Each tensor of a tower is loaded exactly once; those of the language model are left to workers.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import xxhash
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel

from tokenmesh.services.mm_encoder_svc.batcher import Features
from tokenmesh.services.mm_encoder_svc.checkpoint import JsonObject, TowerCheckpoint
from tokenmesh.services.mm_encoder_svc.speech_states import CausalStates, encode_part
from tokenmesh.services.mm_encoder_svc.tower_methods import (
    CAUSAL,
    encoder_states_of,
    methods_of,
    rows_of,
)
from tokenmesh.shared.config.model import Dtype, EncoderSettings
from tokenmesh.shared.errors import CheckpointError, ConfigError, ProtocolError
from tokenmesh.shared.lean_import import without_compiler
from tokenmesh.shared.tensor_blob import TensorBlob
from tokenmesh.shared.tensor_file import TensorShards

SPEECH_STATE_BYTES: Final = 1024 * 1024 * 1024
"""Towers' states after parts of speech."""

# Tensor blobs are little-endian; torch uses the byte order of the host.
assert sys.byteorder == "little"

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}
_DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Tower:
    """One model's encoders on one device. Its methods block; call them from one thread."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        dtype: torch.dtype,
        fingerprint: str,
        states: CausalStates,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._methods = methods_of(model)
        self.encoder_states: int = encoder_states_of(model.config)
        """States of a clip that a decoder attends to; 0: embeddings stand for tokens."""
        self.fingerprint = fingerprint
        """Changes with every weight and setting that changes an embedding."""
        self._causal = model.base_model if model.config.model_type in CAUSAL else None
        self._states = states

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of items that it encodes."""
        return frozenset(self._methods)

    def check(self, features: Features) -> None:
        """Raise ProtocolError for what this tower does not take."""
        method = self._methods.get(features.kind)
        if method is None:
            raise ProtocolError(f"the model has no tower for {features.kind}")
        if features.part is not None and self._causal is None:
            raise ProtocolError("the model's tower does not encode speech in parts")
        parameters = inspect.signature(method).parameters
        for name, tensor in features.tensors.items():
            if name not in parameters:
                raise ProtocolError(f"the model's tower does not take {name}")
            if not tensor.shape:
                raise ProtocolError(f"{name} has no batch dimension")

    def encode(self, batch: list[Features]) -> list[TensorBlob]:
        """Embeddings [num_embeddings, width] of each; those of equal shapes in one pass.

        Raises ProtocolError where the tower makes another number of embeddings.
        """
        by_shape: dict[tuple[object, ...], list[int]] = {}
        for index, features in enumerate(batch):
            by_shape.setdefault(features.shape, []).append(index)
        found: dict[int, TensorBlob] = {}
        for indices in by_shape.values():
            alike = [batch[index] for index in indices]
            encoded = [self._blob(part) for part in self._encode_alike(alike)]
            found.update(zip(indices, encoded, strict=True))
        return [found[index] for index in range(len(batch))]

    @torch.inference_mode()
    def _encode_alike(self, batch: list[Features]) -> list[torch.Tensor]:
        named = {
            name: torch.cat([_tensor(features.tensors[name]) for features in batch])
            for name in batch[0].tensors
        }
        inputs = {name: self._there(tensor) for name, tensor in named.items()}
        try:
            rows = self._rows(batch[0], inputs)
        except MemoryError:
            raise
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"the tower cannot encode this {batch[0].kind}"
            raise ProtocolError(f"{what}: {error}"[:500]) from error
        embeddings = rows.to(self._dtype).cpu().contiguous()
        counts = [features.num_embeddings for features in batch]
        if sum(counts) != len(embeddings):
            raise ProtocolError(
                f"the tower makes {len(embeddings)} embeddings, the prompts have places for "
                f"{sum(counts)}"
            )
        return list(torch.split(embeddings, counts))

    def _rows(self, features: Features, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """All embeddings [n, width] of one pass. Raises StateLost."""
        if features.part is None:
            return _joined(self._methods[features.kind](**inputs, return_dict=True))
        before, part = features.part
        state = self._states.after(before) if before else None
        rows, state = encode_part(self._causal, **inputs, state=state)
        self._states.replace(before, part, state)
        return rows

    def _blob(self, embeddings: torch.Tensor) -> TensorBlob:
        return TensorBlob(
            dtype=_DTYPE_NAMES[self._dtype],
            shape=tuple(embeddings.shape),
            data=embeddings.contiguous().view(torch.uint8).numpy().tobytes(),
        )

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        is_float = tensor.is_floating_point()
        return tensor.to(device=self._device, dtype=self._dtype if is_float else tensor.dtype)


def _tensor(blob: TensorBlob) -> torch.Tensor:
    # frombuffer needs writable memory; the copy also frees the message behind the view.
    dtype = getattr(torch, blob.dtype)
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).view(blob.shape)


def _joined(output: Any) -> torch.Tensor:
    """All embeddings [n, width] of a pass, with those of further layers alongside them."""
    rows = [rows_of(output.pooler_output)]
    rows += [rows_of(layer) for layer in getattr(output, "deepstack_features", None) or ()]
    return torch.cat(rows, dim=1)


def load_tower(found: TowerCheckpoint, dtype: Dtype, limits: EncoderSettings) -> Tower:
    """Load it onto the configured device; blocks. Raises CheckpointError, ConfigError."""
    if limits.threads is not None:
        torch.set_num_threads(limits.threads)
    device = _device(limits)
    resolved = _dtype(dtype, found.config)
    model = _read(found, resolved)
    fingerprint = _hash(model)
    fingerprint.update(repr((model.config.to_dict(), resolved)).encode())
    states = CausalStates(SPEECH_STATE_BYTES)
    return Tower(model.to(device), device, resolved, fingerprint.hexdigest(), states)


def _device(limits: EncoderSettings) -> torch.device:
    has_gpu = limits.device != "cpu" and torch.cuda.is_available()
    if limits.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no GPU", param="encoder.device")
    return torch.device("cuda" if has_gpu else "cpu")


def _dtype(setting: Dtype, config: JsonObject) -> torch.dtype:
    stated = config.get("dtype") or config.get("torch_dtype")
    name = str(stated) if setting == "auto" else setting
    return _DTYPES.get(name, torch.float32)


def _read(found: TowerCheckpoint, dtype: torch.dtype) -> PreTrainedModel:
    directory = found.directory
    try:
        whole = AutoConfig.from_pretrained(directory, local_files_only=True)
        config = getattr(whole, "thinker_config", whole)
        kind = _tower_class(found)
        with without_compiler():
            model, info = kind.from_pretrained(
                None,
                state_dict=_stored(directory),
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except CheckpointError:
        raise
    except Exception as error:  # whatever transformers raises about a config or tensors
        what = f"its tower cannot be loaded: {type(error).__name__}: {error}"
        raise CheckpointError(f"{directory}: {what}"[:1000]) from error
    for name, stored, asked in sorted(info["mismatched_keys"]):
        shapes = f"{tuple(stored)}, not {tuple(asked)}"
        raise CheckpointError(f"{directory}: the tensor {name} has shape {shapes}")
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{directory} lacks the tower's tensors {', '.join(missing[:5])}")
    towers = tuple(name for name, _ in model.named_children() if name != model.base_model_prefix)
    towers += tuple(f"model.{name}" for name, _ in model.base_model.named_children())
    unknown = [name for name in sorted(info["unexpected_keys"]) if name.startswith(towers)]
    if unknown:
        raise CheckpointError(f"{directory}: unknown tensors {', '.join(unknown[:5])}")
    tower: PreTrainedModel = model.eval().requires_grad_(False)
    return tower


def _tower_class(found: TowerCheckpoint) -> Any:
    """The checkpoint's class, whose models have no language model."""
    names = found.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise CheckpointError(f"{found.directory}: transformers has no class {name}")

    def build(self: Any, config: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, config, *args, **named)  # type: ignore[misc]
        body, head = self.get_decoder(), self.get_output_embeddings()
        dropped = [name for name, each in self.named_modules() if each is body or each is head]
        for name in dropped:
            parent, _, child = name.rpartition(".")
            delattr(self.get_submodule(parent), child)
        plain = [re.escape(name.removeprefix("model.")) for name in dropped]
        self._keys_to_ignore_on_load_unexpected |= {rf"^(model\.)?{name}\." for name in plain}

    def tie_nothing(_self: Any, *_args: Any, **_named: Any) -> None:
        """Weights are shared within the language model only."""

    members: dict[str, Any] = {"__init__": build, "__module__": kind.__module__}
    members |= {"tie_weights": tie_nothing, "_tied_weights_keys": None}
    return type(kind.__name__, (kind,), members)


def _stored(directory: Path) -> dict[str, Any]:
    """All tensors by name, unread."""
    shards = TensorShards(directory)
    opened: dict[Path, Any] = {}
    found = {}
    for name in shards:
        path = shards.file_of(name).path
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        found[name] = opened[path].get_slice(name)
    return found


def _hash(model: PreTrainedModel) -> xxhash.xxh3_128:
    """Hash the names and bytes of all weights."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest
