"""quantization_config of compressed-tensors -> Quantization."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch

from tokenmesh.engine.models.quantization.rules import (
    ALL,
    Quantization,
    Rule,
    choose,
    exact,
    expression,
    names,
    plain,
    refuse_unknown,
)
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.linear.formats import (
    E8M0,
    MXFP4_GROUP,
    NVFP4_GROUP,
    WHOLE,
    Format,
    Fp4,
    Packed,
    Scaled,
)

UNAPPLIED: Final = frozenset(
    {
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "k_scale",
        "v_scale",
        "q_scale",
        "kv_scale",
        "output_scale",
        "k_zero_point",
        "v_zero_point",
    }
)
"""Scales of activations, keys and values."""
_CLASSES: Final = ("Linear",)
_EXPRESSION: Final = "re:"
_HARMLESS: Final = (
    "version",
    "global_compression_ratio",
    "run_compressed",
    "dequantize",
    "use_optimized_inference",
    "kv_cache_scheme",
    "quant_method",
)
_OBSERVERS: Final = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Keys about how the scales were found, and types that the tensors state themselves."""


def read_compressed_tensors(raw: RawConfig) -> Quantization:
    """Raises CheckpointError that names the key at fault."""
    choose(raw, "quantization_status", "compressed", "frozen", fallback="compressed")
    _refuse_sparsity(raw)
    transforms = raw.part("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        raise raw.error("transform_config", "is set; rotated weights are not supported")
    groups = raw.part("config_groups")
    if groups is None:
        raise raw.error("config_groups", "is missing")
    named: list[Rule] = []
    by_class: list[Rule] = []
    for key in groups.values:
        group = groups.part(key)
        if group is None:
            continue
        patterns = list(_patterns(group, "targets"))
        form = _format_of(raw, group)
        for pattern in patterns:
            (by_class if pattern is ALL else named).append((pattern, form))
    ignored = plain(_patterns(raw, "ignore"))
    refuse_unknown(raw, _HARMLESS)
    # a name counts before a class of modules
    return Quantization(raw.origin, (*ignored, *named, *by_class), UNAPPLIED)


def _refuse_sparsity(raw: RawConfig) -> None:
    sparsity = raw.part("sparsity_config")
    if sparsity is not None and sparsity.values:
        choose(sparsity, "format", "dense", fallback="dense")


def _patterns(raw: RawConfig, key: str) -> Iterator[re.Pattern[str]]:
    for name in names(raw, key):
        if name.startswith(_EXPRESSION):
            yield expression(raw, key, name.removeprefix(_EXPRESSION))
        elif name in _CLASSES:
            yield ALL
        elif re.fullmatch("[A-Z][A-Za-z0-9]*", name):
            known = ", ".join(_CLASSES)
            raise raw.error(key, f"names the class {name}; supported are names and {known}")
        else:
            yield exact(name)


def _format_of(raw: RawConfig, group: RawConfig) -> Format | None:
    """The format of one group; None where its weights are not quantized."""
    activations = group.part("input_activations")
    if group.part("output_activations") is not None:
        raise group.error("output_activations", "is set; quantized outputs are not supported")
    weights = group.part("weights")
    name = group.get("format") or raw.get("format")
    raw.get("format")
    refuse_unknown(group, ())
    if weights is None:
        return None
    bits = weights.integer("num_bits")
    kind = choose(weights, "type", "int", "float", fallback="int")
    choose(weights, "dynamic", False, fallback=False)
    form = _FORMATS.get((name, kind, bits))
    if form is None:
        known = sorted({each for each, _, _ in _FORMATS})
        raise group.error(
            "format", f"is {name!r} of {bits} bits ({kind}); supported are {', '.join(known)}"
        )
    found = form(weights)
    refuse_unknown(weights, _OBSERVERS)
    if isinstance(found, Scaled) and activations is not None:
        return replace(found, rounds_inputs=activations.values.get("num_bits", 8) == 8)
    return found


def _float8(weights: RawConfig) -> Format:
    choose(weights, "symmetric", True, fallback=True)
    return Scaled(tile=_tile(weights))


def _int8(weights: RawConfig) -> Format:
    return Scaled(
        stored=(torch.int8,),
        tile=_tile(weights),
        zero_point="weight_zero_point",
        is_symmetric=weights.flag("symmetric", True),
    )


def _tile(weights: RawConfig) -> tuple[int, int]:
    _no_order(weights)
    strategy, size = _strategy(weights)
    if strategy == "block":
        return _block(weights)
    return {"tensor": (WHOLE, WHOLE), "channel": (1, WHOLE)}.get(strategy, (1, size))


def _packed(weights: RawConfig) -> Format:
    order = choose(
        weights, "actorder", False, True, "group", "dynamic", "weight", "static", fallback=False
    )
    strategy, size = _strategy(weights)
    if strategy == "block":
        raise weights.error("strategy", "is 'block', which packed integers do not have")
    return Packed(
        bits=weights.integer("num_bits"),
        group_size=size,
        is_tensor=strategy == "tensor",
        has_zeros=not weights.flag("symmetric", True),
        has_order=order in (True, "group", "dynamic"),
    )


def _strategy(weights: RawConfig) -> tuple[str, int]:
    """Return how many weights share a scale, and the size of groups (-1: all inputs)."""
    weights.get("block_structure")
    size = weights.integer("group_size", -1, minimum=-1)
    fallback = "group" if size > 0 else "tensor"
    if weights.get("group_size") == -1:
        fallback = "channel"
    known = ("tensor", "channel", "group", "block")
    strategy = choose(weights, "strategy", *known, fallback=fallback)
    if strategy == "group" and size < 1:
        raise weights.error("group_size", f"is {size}, which strategy 'group' does not allow")
    return strategy, size if strategy == "group" else -1


def _block(weights: RawConfig) -> tuple[int, int]:
    value: Any = weights.get("block_structure")
    if isinstance(value, str):
        value = [int(each) if each.isdigit() else 0 for each in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(_is_size(each) for each in value):
        raise weights.error("block_structure", f"is {value!r}, not rows and columns of a block")
    return value[0], value[1]


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _nvfp4(weights: RawConfig) -> Format:
    _of_groups(weights, "tensor_group", NVFP4_GROUP)
    return Fp4("weight_packed", NVFP4_GROUP, "weight_global_scale", "divide")


def _mxfp4(weights: RawConfig) -> Format:
    _of_groups(weights, "group", MXFP4_GROUP)
    return Fp4("weight_packed", MXFP4_GROUP, None)


def _mxfp8(weights: RawConfig) -> Format:
    _of_groups(weights, "group", MXFP4_GROUP)
    return Scaled(tile=(1, MXFP4_GROUP), scale_types=E8M0)


def _of_groups(weights: RawConfig, strategy: str, size: int) -> None:
    _no_order(weights)
    choose(weights, "symmetric", True, fallback=True)
    choose(weights, "strategy", strategy, fallback=strategy)
    choose(weights, "group_size", size, fallback=size)
    weights.get("block_structure")


def _no_order(weights: RawConfig) -> None:
    choose(weights, "actorder", False, "weight", "static", fallback=False)


_FORMATS: Final = {
    ("float-quantized", "float", 8): _float8,
    ("naive-quantized", "float", 8): _float8,
    ("int-quantized", "int", 8): _int8,
    ("int-quantized", "int", 4): _int8,
    ("naive-quantized", "int", 8): _int8,
    ("pack-quantized", "int", 4): _packed,
    ("pack-quantized", "int", 8): _packed,
    ("nvfp4-pack-quantized", "float", 4): _nvfp4,
    ("mxfp4-pack-quantized", "float", 4): _mxfp4,
    ("mxfp8-quantized", "float", 8): _mxfp8,
}
