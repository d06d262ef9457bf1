"""GgufValues and factors of a GGUF file -> rope_parameters of config.json."""

from typing import Any, Final

from tokenmesh.shared.gguf.metadata import GgufValues, error

_LLAMA3_FACTORS: Final = "rope_freqs.weight"
"""Factors of llama3's rope, which config.json states by its parameters."""
_LONG: Final = "rope_factors_long.weight"
_SHORT: Final = "rope_factors_short.weight"
ROPE_TENSORS: Final = frozenset({_LLAMA3_FACTORS, _LONG, _SHORT})
"""They become numbers of config.json."""


def rope_parameters(data: GgufValues, rotated: int, max_position: int) -> dict[str, Any]:
    """Return rope_parameters for layers that see all tokens. rotated: numbers of a head that turn.

    Raises CheckpointError for a kind that is not known.
    """
    tensors = data.file.tensors
    theta = data.number("rope.freq_base", 10000.0)
    kind = data.get("rope.scaling.type", "none")
    original = data.get("rope.scaling.original_context_length")
    base = {"rope_type": "default", "rope_theta": theta}
    if _LLAMA3_FACTORS in tensors:
        _expect(data, kind, "none", "linear")
        return base | _llama3_scaling(data, rotated // 2, theta)
    if _LONG in tensors or _SHORT in tensors:
        _expect(data, kind, "none", "longrope")
        return base | _long_factors(data, rotated // 2, max_position, original)
    if kind == "none":
        factor = data.get("rope.scaling.factor", 1.0)
        if factor not in (0.0, 1.0) and data.get("rope.scaling.type") is None:
            raise data.error("rope.scaling.factor", f"is {factor!r} without rope.scaling.type")
        return base
    _expect(data, kind, "linear", "yarn")
    scaled = {**base, "rope_type": kind, "factor": data.number("rope.scaling.factor")}
    if kind == "linear":
        return scaled
    scaled["original_max_position_embeddings"] = _whole(data, original)
    for key in ("beta_fast", "beta_slow"):
        if data.get(f"rope.scaling.yarn_{key}") is not None:
            scaled[key] = data.number(f"rope.scaling.yarn_{key}")
    if data.get("rope.scaling.yarn_attn_factor") is not None:
        scaled["attention_factor"] = data.number("rope.scaling.yarn_attn_factor")
    if data.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise data.error("rope.scaling.yarn_ext_factor", "is not 1, which is not supported")
    return scaled


def _expect(data: GgufValues, kind: object, *known: str) -> None:
    if kind not in known:
        names = " and ".join(known)
        raise data.error("rope.scaling.type", f"is {kind!r}; supported are {names}")


def _whole(data: GgufValues, length: object) -> int:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise data.error("rope.scaling.original_context_length", f"is {length!r}")
    return length


def _long_factors(data: GgufValues, pairs: int, max_position: int, original: Any) -> dict[str, Any]:
    found = {
        "rope_type": "longrope",
        "long_factor": _numbers(data, _LONG, pairs).tolist(),
        "short_factor": _numbers(data, _SHORT, pairs).tolist(),
        "original_max_position_embeddings": _whole(data, original),
        "factor": max_position / original,
    }
    if data.get("rope.scaling.attn_factor") is not None:
        found["attention_factor"] = data.number("rope.scaling.attn_factor")
    return found


_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH: Final = 8192
_LLAMA3_KNOWN: Final = (8.0, 16.0, 32.0)
"""As all of its family have them."""


def _llama3_scaling(data: GgufValues, pairs: int, theta: float) -> dict[str, Any]:
    import numpy as np

    found = _numbers(data, _LLAMA3_FACTORS, pairs)
    waves = 2 * np.pi * theta ** (np.arange(pairs) / pairs)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((_LLAMA3_LENGTH / waves - low) / (high - low)).clip(0, 1)
    for factor in _LLAMA3_KNOWN:
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(found, expected, rtol=1e-4):
            length = {"original_max_position_embeddings": _LLAMA3_LENGTH}
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **length}
    raise error(data.file, f"tensor {_LLAMA3_FACTORS} has factors that no known rope has")


def _numbers(data: GgufValues, name: str, count: int) -> Any:
    """float32 [count] of a tensor."""
    import numpy as np

    tensor = data.file.tensors.get(name)
    if tensor is None:
        raise error(data.file, f"tensor {name} is missing")
    if tensor.type.name != "F32" or tensor.shape != (count,):
        raise error(data.file, f"tensor {name} has shape {list(tensor.shape)}")
    with tensor.path.open("rb") as opened:
        opened.seek(tensor.offset)
        content = opened.read(tensor.num_bytes)
    if len(content) != tensor.num_bytes:
        raise error(data.file, f"tensor {name} ends early; is the file complete?")
    return np.frombuffer(content, dtype="<f4")
