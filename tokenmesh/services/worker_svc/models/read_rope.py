"""config.json -> RopeConfig, from rope_theta and rope_scaling or from rope_parameters."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, get_args

from tokenmesh.services.worker_svc.models.config import RopeConfig, RopeKind
from tokenmesh.services.worker_svc.models.raw_config import RawConfig

KINDS: Final[tuple[RopeKind, ...]] = get_args(RopeKind)


def rope_parameters(raw: RawConfig, layer_type: str | None = None) -> RawConfig:
    """The object that describes rope: rope_scaling wins over rope_parameters, as in transformers.

    `layer_type` picks an entry where the parameters are nested by layer type.
    """
    part = raw.part("rope_scaling") or raw.part("rope_parameters")
    values: Mapping[str, Any] = part.values if part else {}
    origin = part.origin if part else f"{raw.origin}: rope_parameters"
    if layer_type is not None and isinstance(values.get(layer_type), Mapping):
        values, origin = values[layer_type], f"{origin}: {layer_type}"
    shared = {key: raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return RawConfig(values, origin, {k: v for k, v in shared.items() if v is not None})


def read_rope(
    raw: RawConfig, parameters: RawConfig, head_dim: int, *, partial_default: bool
) -> RopeConfig:
    """Build the RopeConfig. `partial_default`: the family's default kind may be partial too."""
    kind = _kind(parameters)
    fraction = parameters.number("partial_rotary_factor", 1.0)
    if kind == "default" and not partial_default:
        fraction = 1.0
    # An odd partial dimension is rounded up to whole pairs.
    rotary_dim = 2 * ((int(head_dim * fraction) + 1) // 2)
    if head_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise raw.error("head_dim", f"is {head_dim}; rope needs an even number of at least 2")
    max_position = raw.integer("max_position_embeddings")
    original = raw.integer("original_max_position_embeddings", max_position)
    if raw.get("original_max_position_embeddings") is None:
        original = parameters.integer("original_max_position_embeddings", max_position)
    rope = RopeConfig(
        kind=kind,
        theta=parameters.number("rope_theta", 10000.0),
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
    )
    return rope if kind == "default" else _scaled(rope, parameters)


def longest_position(rope: RopeConfig) -> int:
    """How far the kind stretches the checkpoint's length, by vLLM's rule."""
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_position * rope.factor)
    if rope.kind == "yarn":
        return max(rope.max_position, int(rope.original_max_position * rope.factor))
    return rope.max_position


def _kind(parameters: RawConfig) -> RopeKind:
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    name = "longrope" if name == "su" else name
    for kind in KINDS:
        if kind == name:
            return kind
    raise parameters.error("rope_type", f"is {name!r}; supported are {', '.join(KINDS)}")


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
