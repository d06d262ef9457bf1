"""modules.json: the steps of a sentence-transformers model, read and refused by name.

Only what changes numbers is read. What is not known here is refused before any weight is read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenmesh.services.worker_svc.models.raw_config import RawConfig, read_json
from tokenmesh.shared.errors import CheckpointError

TAKES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of a Pooling module's config, in the order in which results are joined."""
ACTIVATIONS: Final = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""Classes of `torch.nn` that a Dense module may name."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, then an activation."""

    directory: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str
    """One of ACTIVATIONS."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """What follows the transformer."""

    takes: tuple[str, ...] = ("lasttoken",)
    """Values of TAKES, joined in this order."""
    steps: tuple[Dense | str, ...] = ()
    """Dense layers, and "normalize"."""
    includes_prompt: bool = True
    is_stated: bool = False
    """Whether the checkpoint says so; else it is what a decoder is embedded with."""

    def size_of(self, hidden_size: int) -> int:
        """Width of an embedding."""
        size = hidden_size * len(self.takes)
        for step in self.steps:
            if isinstance(step, Dense):
                size = step.outputs
        return size


def read_modules(directory: Path) -> SentenceModules | None:
    """None: the checkpoint has none. Raises CheckpointError for a module that is not known."""
    path = directory / "modules.json"
    if not path.exists():
        return None
    entries = _entries(path)
    takes: tuple[str, ...] | None = None
    steps: list[Dense | str] = []
    includes_prompt = True
    for index, entry in enumerate(entries):
        kind = str(entry.get("type", "")).rpartition(".")[2]
        where = directory / str(entry.get("path", ""))
        if index == 0 and kind == "Transformer":
            continue
        if kind == "Pooling" and takes is None and not steps:
            config = read_json(where / "config.json")
            takes, includes_prompt = _takes(config), config.flag("include_prompt", True)
        elif kind == "Dense" and takes is not None:
            steps.append(_dense(where))
        elif kind == "Normalize" and takes is not None:
            steps.append("normalize")
        else:
            kind_name = entry.get("type")
            raise CheckpointError(f"{path}: module {index}, {kind_name!r}, cannot be served there")
    if takes is None:
        raise CheckpointError(f"{path}: has no Pooling module")
    return SentenceModules(takes, tuple(steps), includes_prompt, is_stated=True)


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise CheckpointError(f"{path}: is not a list of modules")
    return sorted(entries, key=lambda each: each.get("idx", 0))


def _takes(config: RawConfig) -> tuple[str, ...]:
    stated = config.get("pooling_mode")
    if stated is not None:
        found: Sequence[Any] = [stated] if isinstance(stated, str) else stated
        unknown = [each for each in found if each not in TAKES.values()]
        if unknown or not found:
            raise config.error("pooling_mode", f"is {stated!r}, which is not supported")
        return tuple(found)
    unknown = [key for key in config.values if key.startswith("pooling_mode_") and key not in TAKES]
    for key in unknown:
        if config.values[key]:
            raise config.error(key, "is not supported")
    return tuple(name for key, name in TAKES.items() if config.get(key)) or ("mean",)


def _dense(directory: Path) -> Dense:
    config = read_json(directory / "config.json")
    activation = "torch.nn.modules.activation.Tanh"
    if "activation_function" in config.values:
        activation = str(config.get("activation_function") or "torch.nn.modules.linear.Identity")
    name = activation.rpartition(".")[2]
    if name not in ACTIVATIONS or not activation.startswith("torch.nn."):
        raise config.error("activation_function", f"is {activation!r}, which is not supported")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise config.error(key, f"is {config.get(key)!r}, which is not supported")
    if config.flag("use_residual"):
        raise config.error("use_residual", "is true, which is not supported")
    return Dense(
        directory,
        config.integer("in_features"),
        config.integer("out_features"),
        config.flag("bias", True),
        name,
    )
