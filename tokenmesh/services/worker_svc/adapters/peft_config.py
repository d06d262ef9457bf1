"""adapter_config.json as PEFT writes it: what is served of it, and a refusal of the rest."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.errors import InvalidInput

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_BYTES: Final = 1 << 20

_READ: Final = frozenset({"alpha_pattern", "lora_alpha", "peft_type", "r", "rank_pattern",
                          "use_rslora"})  # fmt: skip
_WITHOUT_EFFECT: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "ephemeral_gpu_offload",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters",
    "task_type",
})  # fmt: skip
"""How it was trained, and what the names and shapes of its tensors say as well."""
_PLAIN_STARTS: Final = (None, True, False, "eva", "gaussian", "orthogonal")
"""Of init_lora_weights; others change the base weights before training."""
_HINTS: Final = {
    "use_dora": "DoRA is not served; merge it into the checkpoint",
    "modules_to_save": "whole modules beside the adapter are not served; merge it into the "
    "checkpoint",
    "trainable_token_indices": "trained token embeddings are not served; merge it into the "
    "checkpoint",
    "alora_invocation_tokens": "activated LoRA is not served",
    "fan_in_fan_out": "transposed weights are not served",
    "layer_replication": "replicated layers are not served; merge it into the checkpoint",
    "lora_bias": "biases are not served; merge it into the checkpoint",
    "bias": "biases are not served; merge it into the checkpoint",
    "init_lora_weights": "it changes the base weights; save it with "
    "path_initial_model_for_weight_conversion, which makes it a plain LoRA",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scalings of a LoRA adapter."""

    file: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    """By a pattern of module names."""
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    base_model: str | None
    version: tuple[int, ...] = ()
    """Of PEFT; empty: unknown."""

    def patterns_for(self, module: str) -> bool:
        """Whether a pattern is about a module or something in it."""
        names = [*self.ranks, *self.alphas]
        return any(module.endswith(name.strip("^$").rpartition(".")[0] or name) for name in names)

    def rank_of(self, module: str) -> int:
        """Of a module by its path in the tree."""
        return self.ranks.get(_pattern_of(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of both matrices is multiplied with."""
        rank = self.rank_of(module)
        alpha = self.alphas.get(_pattern_of(self.alphas, module), self.alpha)
        return alpha / (rank**0.5 if self.is_rank_stabilized else rank)


def read_config(directory: Path) -> PeftConfig:
    """Raises InvalidInput that names the file and the key that cannot be served."""
    file = directory / CONFIG_FILE
    raw = _read_object(file)
    if raw.get("peft_type") != "LORA":
        raise refusal(file, "peft_type", f"is {raw.get('peft_type')!r}; only LORA is served")
    if raw.get("init_lora_weights") not in _PLAIN_STARTS:
        value = raw["init_lora_weights"]
        raise refusal(file, "init_lora_weights", f"is {value!r}: {_HINTS['init_lora_weights']}")
    if raw.get("bias") not in (None, "none"):
        raise refusal(file, "bias", f"is {raw['bias']!r}: {_HINTS['bias']}")
    for key, value in raw.items():
        is_known = key in _READ or key in _WITHOUT_EFFECT or key in ("init_lora_weights", "bias")
        if value and not is_known:
            raise refusal(file, key, f"is {_short(value)}: {_HINTS.get(key, 'it is not served')}")
    return PeftConfig(
        file=file,
        rank=_positive(file, "r", raw.get("r")),
        alpha=_number(file, "lora_alpha", raw.get("lora_alpha")),
        ranks={k: _positive(file, f"rank_pattern.{k}", v) for k, v in _map(file, raw, "rank")},
        alphas={k: _number(file, f"alpha_pattern.{k}", v) for k, v in _map(file, raw, "alpha")},
        is_rank_stabilized=raw.get("use_rslora") is True,
        base_model=_text(raw.get("base_model_name_or_path")),
        version=_version(raw.get("peft_version")),
    )


def refusal(file: Path, key: str, what: str) -> InvalidInput:
    """An error about a key or tensor of a file."""
    return InvalidInput(f"{file}: {key} {what}", param="lora_path")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        what = f"{file}: cannot be read: {error.strerror}"
        raise InvalidInput(f"{what}; an adapter holds {CONFIG_FILE}", param="lora_path") from error
    if len(data) > _MAX_BYTES:
        raise InvalidInput(f"{file}: is larger than {_MAX_BYTES} bytes", param="lora_path")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file}: is not valid JSON: {error}", param="lora_path") from error
    if not isinstance(raw, dict):
        raise InvalidInput(f"{file}: is not an object", param="lora_path")
    return raw


def _map(file: Path, raw: dict[str, Any], kind: str) -> list[tuple[str, Any]]:
    value = raw.get(f"{kind}_pattern") or {}
    if not isinstance(value, dict):
        raise refusal(file, f"{kind}_pattern", "is not an object")
    for pattern in value:
        # PEFT treats the keys as regular expressions; names are enough, and cannot be slow
        if not re.fullmatch(r"\^?[\w.\\]+\$?", pattern):
            raise refusal(file, f"{kind}_pattern", f"has the key {pattern!r}, not a module's name")
    return list(value.items())


def _pattern_of(patterns: Mapping[str, object], module: str) -> str:
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", module):
            return pattern
    return ""


def _positive(file: Path, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(file, key, f"is {_short(value)}, not a positive integer")
    return value


def _number(file: Path, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise refusal(file, key, f"is {_short(value)}, not a finite number")
    return float(value)


def _version(value: object) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", value) if isinstance(value, str) else None
    return tuple(map(int, found.groups())) if found else ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
