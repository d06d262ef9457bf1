"""modules.json: the steps of a sentence-transformers model, read and refused by name.

Only what changes numbers is read. What is not known here is refused before any weight is read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenmesh.engine.models.raw_config import RawConfig, read_json
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
NORMALIZE: Final = "normalize"


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
class LogitScore:
    """A score from a decoder's logits behind the last token."""

    true_id: int
    false_id: int | None
    """Its logit is subtracted; None: nothing is."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """It holds what follows the transformer."""

    takes: tuple[str, ...] = ("lasttoken",)
    """Values of TAKES, joined in this order; empty: tokens have embeddings, prompts have none."""
    steps: tuple[Dense | str, ...] = (NORMALIZE,)
    """Dense layers, and NORMALIZE."""
    score: LogitScore | None = None
    """Set: nothing is embedded; the others do not count."""

    def size_of(self, hidden_size: int) -> int:
        """Width of an embedding."""
        size = hidden_size * max(1, len(self.takes))
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
    if not entries or _kind(entries.pop(0)) != "Transformer":
        raise CheckpointError(f"{path}: the first module is not a Transformer")
    if [_kind(each) for each in entries] == ["LogitScore"]:
        return SentenceModules(score=_score(_place(directory, entries[0])))
    takes: tuple[str, ...] = ()
    steps: list[Dense | str] = []
    for number, entry in enumerate(entries, 1):
        kind, where = _kind(entry), _place(directory, entry)
        if NORMALIZE in steps:
            raise CheckpointError(f"{path}: module {number} comes after Normalize")
        if kind == "Pooling" and not takes and not steps:
            takes = _takes(read_json(where / "config.json"))
        elif kind == "Dense":
            steps.append(_dense(where))
        elif kind == "Normalize":
            steps.append(NORMALIZE)
        else:
            problem = f"module {number}, {entry.get('type')!r}, cannot be served there"
            raise CheckpointError(f"{path}: {problem}")
    if not takes and not steps:
        raise CheckpointError(f"{path}: has no module behind the Transformer")
    return SentenceModules(takes, tuple(steps))


def _kind(entry: dict[str, Any]) -> str:
    return str(entry.get("type", "")).rpartition(".")[2]


def _place(directory: Path, entry: dict[str, Any]) -> Path:
    """A module's directory, which never is outside of the model's."""
    name = str(entry.get("path", ""))
    if name != Path(name).name:
        raise CheckpointError(f"{directory}/modules.json: path {name!r} is not a directory in it")
    return directory / name


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise CheckpointError(f"{path}: is not a list of modules")
    return sorted(entries, key=lambda each: each.get("idx", 0))


def _takes(config: RawConfig) -> tuple[str, ...]:
    if not config.flag("include_prompt", True):
        # the tokens of an instruction would have to be left out, and a prompt does not mark them
        raise config.error("include_prompt", "is false, which is not supported")
    stated = config.get("pooling_mode")
    if stated is not None:
        found: Sequence[Any] = [stated] if isinstance(stated, str) else stated
        unknown = [each for each in found if each not in TAKES.values()]
        if unknown or not found:
            raise config.error("pooling_mode", f"is {stated!r}, which is not supported")
        return tuple(found)
    for key, value in config.values.items():
        if key.startswith("pooling_mode_") and key not in TAKES and value:
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
        if config.get(key) not in (None, "sentence_embedding", "token_embeddings"):
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


def _score(directory: Path) -> LogitScore:
    config = read_json(directory / "config.json")
    has_false = config.get("false_token_id") is not None
    return LogitScore(
        config.integer("true_token_id", minimum=0),
        config.integer("false_token_id", minimum=0) if has_false else None,
    )
