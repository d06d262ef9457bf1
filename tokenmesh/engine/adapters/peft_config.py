"""adapter_config.json as PEFT writes it: what is served of it, and a refusal of the rest.

Keys that name modules match as PEFT matches them: those of `rank_pattern` and `alpha_pattern` are
expressions for the end of a name; `targets.py` has those that choose modules.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from tokenmesh.engine.adapters.name_pattern import (
    NamePattern,
    Steps,
    UnusablePattern,
)
from tokenmesh.engine.adapters.targets import (
    ANY_MODULE,
    BadTarget,
    Targets,
    read_targets,
)
from tokenmesh.shared.errors import InvalidInput, TokenMeshError

T = TypeVar("T")

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_BYTES: Final = 1 << 20
_MAX_PATTERNS: Final = 4096
_MAX_INTEGER: Final = 1 << 20
_NAME: Final = re.compile(r"\^?(\w|\.|\\\.)+\$?", re.ASCII)
"""A key that is a module's name, as most are."""
_MAX_CHARS: Final = 500
"""It bounds the characters shown of a name or a problem in an error."""

_READ: Final = frozenset({
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "r", "rank_pattern",
    "target_modules", "target_parameters", "use_rslora",
})  # fmt: skip
_WITHOUT_EFFECT: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "ephemeral_gpu_offload",
    "eva_config", "fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type",
})  # fmt: skip
"""It says how it was trained. `fan_in_fan_out`
says how the base stores a weight; the adapter's own matrices are stored alike."""
_PLAIN_STARTS: Final = (None, True, False, "eva", "gaussian", "orthogonal")
"""These are values of init_lora_weights; others change the base weights before training."""
_HINTS: Final = {
    "use_dora": "DoRA is not served; merge it into the checkpoint",
    "trainable_token_indices": "trained token embeddings are not served; merge it into the "
    "checkpoint",
    "alora_invocation_tokens": "activated LoRA is not served",
    "layer_replication": "replicated layers are not served; merge it into the checkpoint",
    "lora_bias": "biases are not served; merge it into the checkpoint",
    "bias": "biases are not served; merge it into the checkpoint",
    "init_lora_weights": "it changes the base weights; save it with "
    "path_initial_model_for_weight_conversion, which makes it a plain LoRA",
}


@dataclass(frozen=True, slots=True)
class Pattern(Generic[T]):
    """A value for the modules whose names end with an expression."""

    expression: re.Pattern[str] | NamePattern
    value: T


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scalings of a LoRA adapter."""

    file: Path
    rank: int
    alpha: float
    ranks: tuple[Pattern[int], ...]
    """In their order: the first that matches counts."""
    alphas: tuple[Pattern[float], ...]
    is_rank_stabilized: bool
    base_model: str | None
    version: tuple[int, ...] = ()
    """This is the version of PEFT; empty: unknown."""
    saved: tuple[str, ...] = ()
    """Ends of the names of modules that are saved whole."""
    targets: Targets = ANY_MODULE

    def rank_of(self, name: str) -> int:
        """The rank of a module, or of a parameter of experts, by its path in the tree."""
        return self._value_for("rank_pattern", self.ranks, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Return what the product of both matrices is multiplied with."""
        rank = self.rank_of(name)
        alpha = self._value_for("alpha_pattern", self.alphas, name, self.alpha)
        return alpha / (rank**0.5 if self.is_rank_stabilized else rank)

    def _value_for(self, key: str, patterns: tuple[Pattern[T], ...], name: str, default: T) -> T:
        try:
            found = (each.value for each in patterns if each.expression.fullmatch(name))
            return next(found, default)
        except UnusablePattern as error:
            raise refusal(self.file, key, f"has an expression that {error}") from error


def read_config(directory: Path) -> PeftConfig:
    """Raises InvalidInput that names the file and the key that cannot be served."""
    file = directory / CONFIG_FILE
    raw = _read_object(file)
    if raw.get("peft_type") != "LORA":
        raise refusal(file, "peft_type", f"is {short(raw.get('peft_type'))}; only LORA is served")
    if raw.get("init_lora_weights") not in _PLAIN_STARTS:
        value = short(raw["init_lora_weights"])
        raise refusal(file, "init_lora_weights", f"is {value}: {_HINTS['init_lora_weights']}")
    if raw.get("bias") not in (None, "none"):
        raise refusal(file, "bias", f"is {short(raw['bias'])}: {_HINTS['bias']}")
    for key, value in raw.items():
        if value and key not in _READ and key not in _WITHOUT_EFFECT:
            raise refusal(file, key, f"is {short(value)}: {_HINTS.get(key, 'it is not served')}")
    stabilized = raw.get("use_rslora")
    if stabilized not in (None, True, False):
        raise refusal(file, "use_rslora", f"is {short(stabilized)}, neither true nor false")
    steps, saved = Steps(), _saved(file, raw.get("modules_to_save"))
    try:
        targets = read_targets(raw, saved, steps)
    except BadTarget as error:
        raise refusal(file, error.key, error.problem) from error
    return PeftConfig(
        file=file,
        rank=_positive(file, "r", raw.get("r")),
        alpha=_number(file, "lora_alpha", raw.get("lora_alpha")),
        ranks=tuple(_patterns(file, raw, "rank_pattern", _positive, steps)),
        alphas=tuple(_patterns(file, raw, "alpha_pattern", _number, steps)),
        is_rank_stabilized=bool(stabilized),
        base_model=_text(raw.get("base_model_name_or_path")),
        version=_version(raw.get("peft_version")),
        saved=saved,
        targets=targets,
    )


def refusal(file: Path, key: str, what: str) -> InvalidInput:
    """An error about a key or tensor of a file; the file's own words are cut.

    Any client may name an adapter, so that the error has the name of the file, not its path.
    """
    name = key if key.isprintable() else repr(key)
    return InvalidInput(
        f"{file.name}: {name[:_MAX_CHARS]} {what[: 2 * _MAX_CHARS]}", param="lora_path"
    )


def without_folder(file: Path, error: TokenMeshError) -> str:
    """Return what an error about a file says, for any client."""
    return error.message.replace(str(file), file.name)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        # opening a pipe would wait for its writer
        if file.exists() and not file.is_file():
            raise InvalidInput(f"{CONFIG_FILE}: is not a file", param="lora_path")
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        what = f"{CONFIG_FILE}: cannot be read: {error.strerror}"
        raise InvalidInput(f"{what}; an adapter holds {CONFIG_FILE}", param="lora_path") from error
    if len(data) > _MAX_BYTES:
        raise InvalidInput(f"{CONFIG_FILE}: is larger than {_MAX_BYTES} bytes", param="lora_path")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{CONFIG_FILE}: is not valid JSON: {error}", param="lora_path"
        ) from error
    if not isinstance(raw, dict):
        raise InvalidInput(f"{CONFIG_FILE}: is not an object", param="lora_path")
    return raw


def _patterns(
    file: Path,
    raw: dict[str, Any],
    name: str,
    read: Callable[[Path, str, object], T],
    steps: Steps,
) -> Iterator[Pattern[T]]:
    value = raw.get(name) or {}
    if not isinstance(value, dict):
        raise refusal(file, name, "is not an object")
    if len(value) > _MAX_PATTERNS:
        raise refusal(file, name, f"has {len(value)} keys; at most {_MAX_PATTERNS} are served")
    for text, own in value.items():
        whole = rf"(.*\.)?({text})"
        expression: re.Pattern[str] | NamePattern
        if _NAME.fullmatch(text):
            expression = re.compile(whole)  # names have no repetitions, so that this is fast
        else:
            try:
                NamePattern(text, steps)  # its brackets are its own
                expression = NamePattern(whole, steps)
            except UnusablePattern as error:
                what = f"has the key {short(text)}, which {error}"
                raise refusal(file, name, what) from error
        yield Pattern(expression, read(file, f"{name}.{text}", own))


def _saved(file: Path, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise refusal(file, "modules_to_save", f"is {short(value)}, not a list of names")
    return tuple(value)


def _positive(file: Path, key: str, value: object) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not 1 <= value <= _MAX_INTEGER:  # type: ignore[operator]
        raise refusal(file, key, f"is {short(value)}, not a positive integer")
    return value  # type: ignore[return-value]


def _number(file: Path, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise refusal(file, key, f"is {short(value)}, not a finite number")
    return float(value)


def _version(value: object) -> tuple[int, ...]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", value) if isinstance(value, str) else None
    return tuple(map(int, found.groups())) if found else ()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def short(value: object) -> str:
    """The repr of a value of a config, at most 60 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deep {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
