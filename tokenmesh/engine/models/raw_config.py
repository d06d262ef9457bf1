"""RawConfig: config.json with defaults, read key by key, each error naming the key.

The tables at the top list keys whose values would change what is computed. Keys that are read, or
that change nothing, are not in them; a test compares them with all keys that transformers reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.model_files import served_part
from tokenmesh.shared.placeholder_files import placeholder_problem

REFUSED_IN_CONFIG: Final[Mapping[str, Any]] = {
    "is_causal": True,
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "attention_chunk_size": None,
    "kv_sharing_modes": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Keys of config.json, with the only value besides null that is accepted if a family ignores it."""

REFUSED_IN_GENERATION: Final[Mapping[str, Any]] = {
    "min_length": 0,
    "min_new_tokens": 0,
    "stop_strings": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "renormalize_logits": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "token_healing": False,
    "guidance_scale": 1.0,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "diversity_penalty": 0.0,
    "constraints": None,
    "force_words_ids": None,
}
"""Keys of generation_config.json, in the same way."""


def refuse_keys(raw: "RawConfig", keys: Mapping[str, Any], advice: str = "") -> None:
    """Raise CheckpointError for the first of the keys that nothing has read and that is set."""
    for key, neutral in keys.items():
        value = raw.values.get(key)
        if key in raw.read or value is None or value in ([], {}) or value == neutral:
            continue
        raise raw.error(key, f"is {value!r}, which is not supported{advice}")


class RawConfig:
    """A JSON object and where it came from. Null counts as missing."""

    def __init__(
        self, values: Mapping[str, Any], origin: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = values
        self.origin = origin
        self.read: set[str] = set()
        """Keys that were read."""
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> "RawConfig":
        """The same object, with values for keys that it lacks altogether."""
        other = RawConfig(self.values, self.origin, defaults)
        other.read = self.read
        return other

    def get(self, key: str) -> Any:
        """The value, the family's default when the key is absent, or None."""
        self.read.add(key)
        return self.values[key] if key in self.values else self._defaults.get(key)

    def default(self, key: str) -> Any:
        """The family's default, regardless of the file."""
        return self._defaults.get(key)

    def key_of(self, value: object) -> str | None:
        """The first key that has a string, `outer: inner` where it is nested; or None."""
        for key, found in self.values.items():
            if isinstance(found, str) and found == value:
                return key
            if isinstance(found, Mapping) and (inner := RawConfig(found, key).key_of(value)):
                return f"{key}: {inner}"
        return None

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error that names the file and the key."""
        return CheckpointError(f"{self.origin}: {key} {problem}", param=key)

    def integer(self, key: str, fallback: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; `fallback` when there is none."""
        value = self.get(key)
        value = fallback if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"is {value!r}, not a whole number of at least {minimum}")
        return value

    def number(self, key: str, fallback: float | None = None) -> float:
        """A finite number; `fallback` when there is none."""
        value = self.get(key)
        value = fallback if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
            raise self.error(key, f"is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, fallback: bool = False) -> bool:
        """True or false; `fallback` when there is none."""
        value = self.get(key)
        value = fallback if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not true or false")
        return value

    def part(self, key: str) -> "RawConfig | None":
        """A nested object, the family's default when there is none, or None."""
        value = self.get(key)
        value = self.default(key) if value is None else value
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "is not an object")
        return RawConfig(value, f"{self.origin}: {key}")

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """A list of exactly `length` entries, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"is not a list of {length} entries")
        return value


def architecture_of(raw: RawConfig) -> str:
    """The first of `architectures`. Raises CheckpointError."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise raw.error("architectures", "is missing: it is not the config of a language model")
    return names[0]


def read_config(directory: Path) -> RawConfig:
    """config.json of what is served of a checkpoint. Raises CheckpointError."""
    whole = read_json(directory / "config.json")
    return RawConfig(served_part(whole.values), whole.origin)


def read_json(path: Path) -> RawConfig:
    """Read a JSON object. Raises CheckpointError that names the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        problem = placeholder_problem(path) or f"is not valid JSON ({error})"
        raise CheckpointError(f"{path}: {problem}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return RawConfig(values, str(path))
