"""Whisper in CTranslate2 directories, as its converter lays them out, from transformers' own."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

_TYPES: Final = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_LAYER: Final = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": ("self_attn", "qkv"),
    "self_attention/linear_1": ("self_attn", "o"),
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_CROSS: Final = {
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": ("encoder_attn", "q"),
    "attention/linear_1": ("encoder_attn", "kv"),
    "attention/linear_2": ("encoder_attn", "o"),
}
_PROJECTIONS: Final = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


_UNUSED: Final = "\u00ff"
"""The byte 255, which no text has."""


@dataclass
class Ct2Content:
    """The content of a model.bin."""

    variables: dict[str, torch.Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    version: int = 6
    specification: str = "WhisperSpec"
    revision: int = 3

    def number(self, name: str) -> torch.Tensor:
        """Return the numbers of a variable, float32."""
        found = self.variables[name].float()
        scale = self.variables.get(f"{name}_scale", torch.ones(()))
        return found / scale.view(-1, *[1] * (found.dim() - 1)) if found.dim() else found

    def encode(self) -> bytes:
        parts = [struct.pack("<I", self.version), _name(self.specification)]
        parts.append(struct.pack("<II", self.revision, len(self.variables)))
        for name, tensor in sorted(self.variables.items()):
            kind = _TYPES.index(str(tensor.dtype).removeprefix("torch."))
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            sizes = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
            parts += [_name(name), sizes, struct.pack("<BI", kind, len(content)), content]
        parts.append(struct.pack("<I", len(self.aliases)))
        for alias, name in self.aliases.items():
            parts += [_name(alias), _name(name)]
        return b"".join(parts)


def _name(text: str) -> bytes:
    encoded = text.encode() + b"\0"
    return struct.pack("<H", len(encoded)) + encoded


Store = Callable[[torch.Tensor], dict[str, torch.Tensor]]
"""A weight -> "" with what is stored for it, and "_scale" with its scale."""


def plain(dtype: torch.dtype) -> Store:
    return lambda weight: {"": weight.to(dtype)}


def int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = weight.flatten(1)
    most = rows.abs().amax(1)
    scale = 127 / torch.where(most == 0, torch.tensor(127.0), most)
    codes = (rows * scale[:, None]).round().to(torch.int8)
    return {"": codes.view(weight.shape), "_scale": scale}


def int16(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = 2**10 / weight.abs().amax()
    return {"": (weight * scale).round().to(torch.int16), "_scale": scale}


def whisper_content(source: Path, store: Store, others: torch.dtype = torch.float32) -> Ct2Content:
    """The content of a model.bin.

    others: the type of what is not the weight of a matrix or a convolution.
    """
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for part, heads in (
        ("encoder", "encoder_attention_heads"),
        ("decoder", "decoder_attention_heads"),
    ):
        ours = f"model.{part}"
        found[f"{part}/num_heads"] = torch.tensor(config[heads], dtype=torch.int16)
        found[f"{part}/position_encodings/encodings"] = tensors[f"{ours}.embed_positions.weight"]
        _module(found, tensors, f"{part}/layer_norm", f"{ours}.layer_norm")
        names = _LAYER if part == "encoder" else {**_LAYER, **_CROSS}
        for layer in range(config[f"{part}_layers"]):
            for name, own in names.items():
                theirs, within = f"{part}/layer_{layer}/{name}", f"{ours}.layers.{layer}"
                if isinstance(own, str):
                    _module(found, tensors, theirs, f"{within}.{own}")
                else:
                    _joined(found, tensors, theirs, f"{within}.{own[0]}", own[1])
    for name in ("conv1", "conv2"):
        _module(found, tensors, f"encoder/{name}", f"model.encoder.{name}")
    found["decoder/embeddings/weight"] = tensors["model.decoder.embed_tokens.weight"]
    flags = {"activation": 3, "alibi": 0, "pre_norm": 1, "scale_embeddings": 0}
    flags["start_from_zero_embedding"] = 0
    for name, flag in flags.items():
        found[f"decoder/{name}"] = torch.tensor(flag, dtype=torch.int8)
    numbers = {"alignment_heads": 1, "alignment_layer": -1}
    for name, number in numbers.items():
        found[f"decoder/{name}"] = torch.tensor(number, dtype=torch.int16)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        kept = {"": tensor}
        if tensor.is_floating_point():
            kept = store(tensor) if name.endswith("/weight") else {"": tensor.to(others)}
        stored |= {f"{name}{end}": each for end, each in kept.items()}
    return Ct2Content(stored, {"decoder/projection/weight": "decoder/embeddings/weight"})


def _module(
    found: dict[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], theirs: str, ours: str
) -> None:
    names = ("gamma", "beta") if theirs.endswith("layer_norm") else ("weight", "bias")
    for name, own in zip(names, ("weight", "bias"), strict=True):
        found[f"{theirs}/{name}"] = tensors[f"{ours}.{own}"]


def _joined(
    found: dict[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    theirs: str,
    ours: str,
    letters: str,
) -> None:
    names = [f"{ours}.{_PROJECTIONS[each]}" for each in letters]
    weights = [tensors[f"{name}.weight"] for name in names]
    found[f"{theirs}/weight"] = torch.cat(weights)
    biases = [
        tensors.get(f"{name}.bias", torch.zeros(len(weight)))
        for name, weight in zip(names, weights, strict=True)
    ]
    found[f"{theirs}/bias"] = torch.cat(biases)


def write_whisper(
    source: Path, target: Path, content: Ct2Content, *, vocabulary: str = "vocabulary.json"
) -> Path:
    """A directory of CTranslate2 from one of transformers."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.bin").write_bytes(content.encode())
    generation: dict[str, Any] = json.loads((source / "generation_config.json").read_text())
    config = {
        "suppress_ids": generation["suppress_tokens"],
        "suppress_ids_begin": generation["begin_suppress_tokens"],
        "alignment_heads": generation["alignment_heads"],
        "lang_ids": sorted(generation["lang_to_id"].values()),
    }
    (target / "config.json").write_text(json.dumps(config))
    whole = json.loads((source / "tokenizer.json").read_text())
    ids = {
        **whole["model"]["vocab"],
        **{each["content"]: each["id"] for each in whole["added_tokens"]},
    }
    tokens = sorted(ids, key=lambda token: ids[token])
    if generation["is_multilingual"]:
        tokens[tokens.index(_UNUSED)] = ""  # by which such vocabularies are known
    is_json = vocabulary.endswith(".json")
    text = json.dumps(tokens, indent=2) if is_json else "\n".join(tokens) + "\n"
    (target / vocabulary).write_text(text, encoding="utf-8")
    # as converters copy it from former releases of Whisper
    times = ids["<|notimestamps|>"]
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["id"] <= times]
    (target / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    shutil.copy(source / "preprocessor_config.json", target)
    return target
