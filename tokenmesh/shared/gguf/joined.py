"""Experts of gpt-oss in a GGUF file -> the tensors of its own checkpoints.

There each layer has one tensor of all experts, in which rows of gate and up take turns. Blocks of
MXFP4 stay what they are; of their numbers, the second half lies in upper halves of bytes here, and
every second one there.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tokenmesh.shared.gguf.metadata import GgufValues, error
from tokenmesh.shared.gguf.names import MAX_EXPERTS
from tokenmesh.shared.gguf.reader import GgufTensor
from tokenmesh.shared.unpacked import MadeTensor

if TYPE_CHECKING:
    import numpy as np

_BLOCKED: Final = "MXFP4"
_HALF: Final = 16
"""Bytes of a block behind its scale."""
_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


def is_joined(name: str) -> bool:
    """Return whether a tensor is a part of one that is made here."""
    return name.split(".")[-2] in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def joined(data: GgufValues, layers: int) -> Iterator[MadeTensor]:
    """Raises CheckpointError for a tensor that is missing, misshapen or of another type."""
    for layer in range(layers):
        within = f"model.layers.{layer}.mlp.experts"
        for own, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            names = [f"blk.{layer}.ffn_{part}_exps" for part in parts]
            yield from _weight(data, f"{within}.{own}", [f"{name}.weight" for name in names])
            biases = [_tensor(data, f"{name}.bias", 2) for name in names]
            if any(each.type.name != "F32" for each in biases):
                raise error(data.file, f"tensor {names[0]}.bias is not F32")
            experts, rows = biases[0].shape
            yield MadeTensor(
                f"{within}.{own}_bias",
                "F32",
                (experts, rows * len(biases)),
                _maker(biases, 4, lambda turns: turns.tobytes()),
            )


def _weight(data: GgufValues, own: str, names: list[str]) -> Iterator[MadeTensor]:
    tensors = [_tensor(data, name, 3) for name in names]
    (kind,) = {each.type.name for each in tensors} if len(tensors) == 1 else _kinds(tensors)
    experts, rows, inputs = tensors[0].shape
    rows *= len(tensors)
    if kind == _BLOCKED:
        groups = inputs // 32
        size = tensors[0].type.size
        block = (experts, rows, groups)
        yield MadeTensor(
            f"{own}_blocks", "U8", (*block, _HALF), _maker(tensors, groups * size, _codes)
        )
        yield MadeTensor(f"{own}_scales", "U8", block, _maker(tensors, groups * size, _scales))
    elif kind in _BYTES:
        width = _BYTES[kind]

        def turned(turns: "np.ndarray[Any, Any]") -> bytes:
            return turns.reshape(rows, inputs, width).swapaxes(0, 1).tobytes()

        yield MadeTensor(
            own, kind, (experts, inputs, rows), _maker(tensors, inputs * width, turned)
        )
    else:
        known = ", ".join((_BLOCKED, *_BYTES))
        raise error(data.file, f"tensor {names[0]} is of type {kind}; supported here are {known}")


def _kinds(tensors: list[GgufTensor]) -> set[str]:
    found = {each.type.name for each in tensors}
    return found if len(found) == 1 else {" and ".join(sorted(found))}


def _tensor(data: GgufValues, name: str, dimensions: int) -> GgufTensor:
    tensor, count = data.file.tensors.get(name), data.integer("expert_count")
    if tensor is None:
        raise error(data.file, f"tensor {name} is missing")
    if len(tensor.shape) != dimensions or tensor.shape[0] != count or count > MAX_EXPERTS:
        raise error(data.file, f"tensor {name} has shape {list(tensor.shape)} for {count} experts")
    first = data.file.tensors.get(name.replace("_up_", "_gate_"))
    if first is None or first.shape != tensor.shape:
        raise error(data.file, f"tensor {name} has another shape than that of the gate")
    return tensor


def _maker(
    tensors: list[GgufTensor], row_bytes: int, form: "Callable[[np.ndarray[Any, Any]], bytes]"
) -> Callable[[], Iterator[bytes]]:
    """One expert after the other: rows of the tensors in turn, as uint8 [rows, row_bytes]."""

    def pieces() -> Iterator[bytes]:
        import numpy as np

        size = tensors[0].num_bytes // tensors[0].shape[0]
        for expert in range(tensors[0].shape[0]):
            parts = []
            for tensor in tensors:
                with tensor.path.open("rb") as source:
                    source.seek(tensor.offset + expert * size)
                    parts.append(np.frombuffer(source.read(size), np.uint8))
            yield form(np.stack([part.reshape(-1, row_bytes) for part in parts], 1))

    return pieces


def _scales(turns: "np.ndarray[Any, Any]") -> bytes:
    return bytes(turns.reshape(-1, 1 + _HALF)[:, 0])


def _codes(turns: "np.ndarray[Any, Any]") -> bytes:
    import numpy as np

    packed = turns.reshape(-1, 1 + _HALF)[:, 1:]
    in_order = np.concatenate((packed & 15, packed >> 4), 1)
    return bytes(in_order[:, ::2] | (in_order[:, 1::2] << 4))
