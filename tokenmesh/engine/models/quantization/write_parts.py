"""A module's tensors, and the configuration, as compressed-tensors stores them."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from tokenmesh.engine.models.quantization.gptq import GptqSpec, GptqWeight
from tokenmesh.kernels.codes import Codes
from tokenmesh.kernels.linear.formats.round import INT4_GROUP, Rounding

FORMATS: Final[dict[Rounding, str]] = {
    "int8": "int-quantized",
    "int4": "pack-quantized",
    "fp8": "float-quantized",
}
_IN_WORD: Final = 8
"""Numbers of 4 bits in an int32."""


def rounded_parts(codes: Codes, to: Rounding) -> dict[str, torch.Tensor]:
    """The tensors of a module whose weight was rounded to the nearest."""
    if to == "fp8":
        weight = codes.numbers.view(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale": codes.scales}
    if to == "int8":
        return {"weight": (codes.numbers ^ 128).view(torch.int8), "weight_scale": codes.scales}
    return _packed_parts(codes.numbers, codes.scales)


def _packed_parts(numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": _words(numbers),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(numbers.shape),
    }


def calibrated_parts(weight: GptqWeight, spec: GptqSpec) -> dict[str, torch.Tensor]:
    """The tensors of a module whose weight was rounded by GPTQ."""
    if spec.bits == 8:
        return {"weight": (weight.numbers ^ 128).view(torch.int8), "weight_scale": weight.scales}
    parts = _packed_parts(weight.numbers, weight.scales)
    if not spec.is_symmetric:
        parts["weight_zero_point"] = _words(weight.zeros.to(torch.uint8).t()).t().contiguous()
    return parts


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [N, M] below 16 -> int32 [N, ceil(M / 8)], the first number in the lowest bits."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % _IN_WORD))
    words = torch.zeros(len(padded), padded.shape[1] // _IN_WORD, dtype=torch.int32)
    for place in range(_IN_WORD):
        words |= padded[:, place::_IN_WORD].int() << 4 * place
    return words


def config_of(to: Rounding, plain: Sequence[str], spec: GptqSpec | None) -> dict[str, Any]:
    """The configuration of compressed-tensors; spec: None for weights rounded to the nearest."""
    kind = "float" if to == "fp8" else "int"
    bits = 4 if to == "int4" else 8
    common = {"num_bits": bits, "type": kind, "symmetric": True}
    weights = {**common, "dynamic": False, "strategy": "channel"}
    activations = {**common, "dynamic": True, "strategy": "token"}
    if to == "int4":
        size = INT4_GROUP if spec is None else spec.group_size
        weights |= {"strategy": "group", "group_size": size}
        if spec is not None:
            weights["symmetric"] = spec.is_symmetric
            weights["actorder"] = "weight" if spec.act_order else None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if to == "int4" else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[to],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({*plain, "lm_head"}),
        "kv_cache_scheme": None,
    }
