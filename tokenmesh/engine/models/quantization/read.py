"""config.json -> Quantization, by its quant_method."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tokenmesh.engine.models.quantization import methods
from tokenmesh.engine.models.quantization.compressed_tensors import (
    read_compressed_tensors,
)
from tokenmesh.engine.models.quantization.rules import Quantization
from tokenmesh.engine.models.raw_config import RawConfig, read_json

MODELOPT_FILE: Final = "hf_quant_config.json"
"""Where modelopt describes checkpoints whose config.json does not."""
KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json; the second is an older name."""
_MXFP4_TYPES: Final = ("gpt_oss",)
"""Model types whose experts lie in MXFP4 as `Mxfp4Experts` reads them."""

_METHODS: Final[Mapping[str, Callable[[RawConfig], Quantization]]] = {
    "awq": methods.read_awq,
    "bitsandbytes": methods.read_bitsandbytes,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": methods.read_fbgemm,
    "fp8": methods.read_fp8,
    "gguf": methods.read_gguf,
    "gptq": methods.read_gptq,
    "modelopt": methods.read_modelopt,
    "modelopt_fp4": methods.read_modelopt,
    "mxfp4": methods.read_mxfp4,
}
_REMOVED: Final = (
    *("marlin", "marlin_24", "gptq_marlin_24", "bitblas", "gptq_bitblas", "aqlm"),
    *("marlin-24", "sparse-24-bitmask", "sparse-bitmask"),
)
"""Layouts for single kernels, which other engines have removed as well."""
_FORMAT_KEYS: Final = ("quant_method", "format", "checkpoint_format")
_ADVICE: Final = "convert it to pack-quantized of compressed-tensors or to GPTQ (format gptq)"


def read_quantization(raw: RawConfig) -> Quantization | None:
    """The quantization that config.json states; None: the weights are not quantized.

    Raises CheckpointError that names the key, for everything that is not understood.
    """
    part = next((found for key in KEYS if (found := _part_of(raw, key)) is not None), None)
    part = _modelopt_file(raw) if part is None else part
    if part is None:
        return None
    for key in _FORMAT_KEYS:
        value = part.get(key) if key == "quant_method" else part.values.get(key)
        if value in _REMOVED:
            raise part.error(key, f"is {value!r}, which is not supported; {_ADVICE}")
    if part.values.get("is_marlin_format"):
        raise part.error("is_marlin_format", f"is set, which is not supported; {_ADVICE}")
    method = part.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        known = ", ".join(_METHODS)
        raise part.error("quant_method", f"is {method!r}; supported are {known}")
    if method == "mxfp4" and raw.get("model_type") not in _MXFP4_TYPES:
        problem = f"is 'mxfp4', which only {', '.join(_MXFP4_TYPES)} has"
        raise part.error("quant_method", problem)
    return replace(reader(part), method=method)


def _part_of(raw: RawConfig, key: str) -> RawConfig | None:
    """The key's object, of the model or of the language model within it."""
    part = raw.part(key)
    text = raw.values.get("text_config")
    if part is None and isinstance(text, Mapping) and text.get(key) is not None:
        return RawConfig(text, f"{raw.origin}: text_config").part(key)
    return part


def _modelopt_file(raw: RawConfig) -> RawConfig | None:
    path = Path(raw.origin).with_name(MODELOPT_FILE)
    if not path.is_file():
        return None
    part = read_json(path).part("quantization")
    if part is None or part.values.get("quant_algo") is None:
        return None
    return RawConfig({"quant_method": "modelopt", **part.values}, part.origin)
