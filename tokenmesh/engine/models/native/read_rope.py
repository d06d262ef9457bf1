"""config.json -> RopeConfig, from rope_theta and rope_scaling or from rope_parameters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from tokenmesh.engine.layers.rotary import RopeConfig, RopeKind
from tokenmesh.engine.models.native.layer_patterns import FULL, SLIDING
from tokenmesh.engine.models.raw_config import RawConfig

_KINDS: Final[Mapping[str, RopeKind]] = {kind: kind for kind in get_args(RopeKind)}

KEYS: Final = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
        "max_position_embeddings",
    }
)
"""Keys that a rope object may have. A kind ignores those that are meant for others, and all kinds
ignore the last two, as transformers does."""

_THETA: Final = 10000.0


@dataclass(frozen=True, slots=True)
class RopeRules:
    """It says how a family reads its rope."""

    kinds: Mapping[str, RopeKind] = field(default_factory=lambda: _KINDS)
    """Kind by its name in config.json."""
    keys: frozenset[str] = frozenset()
    """Keys that only this family's rope objects may have."""
    default_is_partial: bool = False
    """The default kind, too, may turn only a part of each head."""
    by_type: bool = False
    """Sliding layers have their own rope, without scaling unless it is given for them."""


def read_ropes(raw: RawConfig, rules: RopeRules, head_dim: int) -> tuple[RopeConfig, ...]:
    """The family's ropes: one, or one of full and one of sliding layers."""
    if not rules.by_type:
        return (_read(raw, rope_parameters(raw), rules, head_dim),)
    ropes = tuple(_read(raw, part, rules, head_dim) for part in _by_type(raw))
    if len({rope.boundary for rope in ropes} | {None}) > 2:
        raise raw.error("rope_parameters", "has longrope of two different original lengths")
    if "longrope" in {rope.kind for rope in ropes} and "dynamic" in {rope.kind for rope in ropes}:
        raise raw.error("rope_parameters", "mixes longrope and dynamic, which is not supported")
    return ropes


def rope_parameters(raw: RawConfig) -> RawConfig:
    """The object that describes rope: rope_scaling unless it is empty, else rope_parameters."""
    part = _filled(raw, "rope_scaling") or _filled(raw, "rope_parameters")
    shared = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    defaults = {key: value for key, value in shared.items() if value is not None}
    if part is None:
        return RawConfig({}, f"{raw.origin}: rope_parameters", defaults)
    return part.with_defaults(defaults)


def original_length(raw: RawConfig, parameters: RawConfig) -> int:
    """The length before scaling: that of the whole file comes before that of the rope object."""
    for source in (raw, parameters):
        if source.get("original_max_position_embeddings") is not None:
            return source.integer("original_max_position_embeddings")
    return raw.integer("max_position_embeddings")


def longest_position(rope: RopeConfig) -> int:
    """Return how far the kind stretches the checkpoint's length."""
    return stretched(rope.kind, rope.max_position, rope.factor, rope.original_max_position)


def stretched(kind: str, max_position: int, factor: float, original: int) -> int:
    """A length that a kind of rope stretches, by vLLM's rule."""
    if kind in ("linear", "dynamic"):
        return int(max_position * factor)
    return max(max_position, int(original * factor)) if kind == "yarn" else max_position


def _filled(raw: RawConfig, key: str) -> RawConfig | None:
    """A nested object; None when there is none or it is empty."""
    part = raw.part(key)
    return part if part is not None and part.values else None


def _by_type(raw: RawConfig) -> tuple[RawConfig, RawConfig]:
    """The rope objects of full and of sliding layers.

    In the old spelling, scaling and theta stand for full layers only, so a theta that is not the
    family's leaves open what sliding layers were trained with.
    """
    nested, scaling = raw.part("rope_parameters"), raw.part("rope_scaling")
    for key in nested.values if nested is not None else ():
        if key not in (FULL, SLIDING):
            raise raw.error("rope_parameters", f"holds {key!r}; this family has it by layer type")
    if raw.get("original_max_position_embeddings") is not None:
        raise raw.error("original_max_position_embeddings", "belongs into rope_parameters")
    fraction = raw.number("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        raise raw.error("partial_rotary_factor", f"is {fraction}; supported is 1.0")
    theta = raw.number("rope_theta")
    parts = []
    for kind in (FULL, SLIDING):
        part = None if nested is None else nested.part(kind)
        own = dict(part.values) if part is not None else {}
        if kind == FULL and scaling is not None:
            own |= scaling.values
        if own.get("truncate") is False:
            raise raw.error("truncate", "is false, which this family does not support")
        if own.get("rope_theta") is None and theta != raw.default("rope_theta"):
            raise raw.error("rope_theta", f"is {theta}; give it in rope_parameters by layer type")
        origin = f"{raw.origin}: rope_parameters: {kind}"
        parts.append(RawConfig(own, origin, {"rope_theta": theta}))
    return parts[0], parts[1]


def _read(raw: RawConfig, parameters: RawConfig, rules: RopeRules, head_dim: int) -> RopeConfig:
    """Build the RopeConfig of one rope object."""
    for key, value in parameters.values.items():
        if value is not None and key not in KEYS | rules.keys:
            raise parameters.error(key, "is not a supported key of a rope object")
    kind = _kind(parameters, rules)
    if kind == "dynamic" and "alpha" in rules.keys and parameters.get("alpha"):
        return _fixed_alpha(raw, parameters, head_dim)
    fraction = parameters.number("partial_rotary_factor", 1.0)
    if not rules.default_is_partial:
        if kind != "default" and fraction != 1.0:
            raise parameters.error("partial_rotary_factor", f"is {fraction}; supported is 1.0")
        fraction = 1.0
    rotary_dim = int(head_dim * fraction)
    if head_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise raw.error("head_dim", f"is {head_dim}; rope needs an even number of at least 2")
    if rotary_dim % 2:
        problem = f"turns {rotary_dim} of a head's {head_dim} numbers; supported are whole pairs"
        raise parameters.error("partial_rotary_factor", problem)
    rope = RopeConfig(
        kind=kind,
        theta=parameters.number("rope_theta", _THETA),
        rotary_dim=rotary_dim,
        max_position=raw.integer("max_position_embeddings"),
        original_max_position=original_length(raw, parameters),
    )
    return rope if kind == "default" else _scaled(rope, parameters)


def _fixed_alpha(raw: RawConfig, parameters: RawConfig, head_dim: int) -> RopeConfig:
    """HunYuan labels a fixed stretch of the base "dynamic"."""
    theta, alpha = parameters.number("rope_theta", _THETA), parameters.number("alpha")
    stretched = theta * alpha ** (head_dim / (head_dim - 2))
    plain = RawConfig({"rope_theta": stretched}, parameters.origin)
    return _read(raw, plain, RopeRules(), head_dim)


def _kind(parameters: RawConfig, rules: RopeRules) -> RopeKind:
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = rules.kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        supported = ", ".join(rules.kinds)
        raise parameters.error("rope_type", f"is {name!r}; supported are {supported}")
    return kind


def _scaled(rope: RopeConfig, parameters: RawConfig) -> RopeConfig:
    ratio = rope.max_position / rope.original_max_position
    if rope.kind in ("yarn", "longrope"):
        factor = parameters.number("factor", ratio)
    else:
        factor = parameters.number("factor")
    if factor <= 0:
        raise parameters.error("factor", f"is {factor}; it must be positive")
    rope = replace(rope, factor=factor)
    if rope.kind == "llama3":
        return replace(
            rope,
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
        )
    if rope.kind == "yarn":
        return _yarn(rope, parameters)
    if rope.kind == "longrope":
        return _longrope(rope, parameters)
    return rope


def _yarn(rope: RopeConfig, parameters: RawConfig) -> RopeConfig:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    weight, weight_all = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    natural = mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
    return replace(
        rope,
        attention_factor=parameters.number("attention_factor", natural),
        beta_fast=parameters.number("beta_fast", 0.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 0.0) or 1.0,
        truncate=parameters.flag("truncate", True),
    )


def _longrope(rope: RopeConfig, parameters: RawConfig) -> RopeConfig:
    natural = 1.0
    if rope.factor > 1.0:
        natural = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    pairs = rope.rotary_dim // 2
    short = parameters.sequence("short_factor", pairs)
    long = parameters.sequence("long_factor", pairs)
    if short is None or long is None:
        raise parameters.error("short_factor and long_factor", "are both needed for longrope")
    return replace(
        rope,
        attention_factor=parameters.number("attention_factor", natural),
        short_factor=tuple(float(value) for value in short),
        long_factor=tuple(float(value) for value in long),
    )
