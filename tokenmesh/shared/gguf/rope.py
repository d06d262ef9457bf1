"""Metadata and factors of a GGUF file -> rope_scaling of config.json."""

from collections.abc import Mapping
from typing import Any, Final

from tokenmesh.shared.gguf.metadata import error
from tokenmesh.shared.gguf.reader import GgufFile

ROPE_FACTORS: Final = "rope_freqs.weight"
"""Factors of llama3's rope, which config.json states by its parameters."""


def rope_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Raises CheckpointError for a kind that is not known."""
    prefix = f"{file.values['general.architecture']}.rope."
    rotated = file.values.get(f"{prefix}dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise error(file, f"{prefix}dimension_count is {rotated}, not that of a head")
    kind = file.values.get(f"{prefix}scaling.type")
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    factor = file.values.get(f"{prefix}scaling.factor")
    if kind in (None, "none"):
        return None
    if not isinstance(factor, int | float) or not factor > 0:
        raise error(file, f"{prefix}scaling.factor is {factor!r}")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        length = file.values.get(f"{prefix}scaling.original_context_length")
        if not isinstance(length, int):
            raise error(file, f"{prefix}scaling.original_context_length is {length!r}")
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        return scaling | {"original_max_position_embeddings": length}
    raise error(file, f"{prefix}scaling.type is {kind!r}; supported are linear and yarn")


_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH: Final = 8192
_LLAMA3_FACTORS: Final = (8.0, 32.0)
"""As all of its family have them."""


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    tensor = file.tensors[ROPE_FACTORS]
    pairs = config["head_dim"] // 2
    if tensor.type.name != "F32" or tensor.shape != (pairs,):
        raise error(file, f"tensor {ROPE_FACTORS} has shape {list(tensor.shape)}")
    with tensor.path.open("rb") as opened:
        opened.seek(tensor.offset)
        found = np.frombuffer(opened.read(tensor.num_bytes), dtype="<f4")
    waves = 2 * np.pi * config["rope_theta"] ** (np.arange(pairs) / pairs)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((_LLAMA3_LENGTH / waves - low) / (high - low)).clip(0, 1)
    for factor in _LLAMA3_FACTORS:
        expected = 1 / ((1 - smooth) / factor + smooth)
        if found.shape == expected.shape and np.allclose(found, expected, rtol=1e-4):
            length = {"original_max_position_embeddings": _LLAMA3_LENGTH}
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **length}
    raise error(file, f"tensor {ROPE_FACTORS} has factors that no known rope has")
