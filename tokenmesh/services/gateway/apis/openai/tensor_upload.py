"""read_tensor: the one tensor of a file that a client sent, as a TensorBlob.

The file is one of safetensors. Those of `torch.save` are pickles, which are programs: they are
refused with the way to convert them.
"""

import math
from typing import Annotated, Final

import msgspec

from tokenmesh.shared.tensor_blob import BYTES_BY_DTYPE, TensorBlob

_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 16 * 1024
_PICKLES: Final = (b"PK\x03\x04", b"\x80")
"""It holds what torch.save begins a file with: a zip of a pickle, or formerly the pickle itself."""
_TORCH: Final = (
    "it is a torch.save file, a pickle, which is never read: send the bytes of "
    'safetensors.torch.save({"x": tensor.contiguous()})'
)
_WINDOW_BYTES: Final = 256 * 1024
"""Whole elements of each dtype. A pass over a window holds the GIL for less than 1 ms."""
_MOST: Final = 1 << 40
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_header_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry_decoder: Final = msgspec.json.Decoder(_Entry)


def read_tensor(data: bytes) -> TensorBlob:
    """A tensor of floats. Raises ValueError with the reason."""
    blob = _read_safetensors(data)
    if not _is_finite(blob.dtype, bytes(blob.data)):
        raise ValueError("it holds numbers that are not finite")
    return blob


def _read_safetensors(data: bytes) -> TensorBlob:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    start = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or start > len(data):
        raise ValueError(_TORCH if data.startswith(_PICKLES) else "it is not a safetensors file")
    try:
        header = _header_decoder.decode(data[_LENGTH_BYTES:start])
        header.pop("__metadata__", None)
        entries = [_entry_decoder.decode(raw) for raw in header.values()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"its header is broken: {error}") from error
    if len(entries) != 1:
        raise ValueError(f"it holds {len(entries)} tensors, not one")
    dtype, (begin, end) = _DTYPES.get(entries[0].dtype), entries[0].data_offsets
    if dtype is None:
        raise ValueError(f"it is a tensor of {entries[0].dtype}, not of F32, F16 or BF16")
    if (begin, end) != (0, len(data) - start):
        raise ValueError("its tensor does not fill the file")
    if math.prod(entries[0].shape) * BYTES_BY_DTYPE[dtype] != end:
        raise ValueError(f"{end} bytes do not match the shape {list(entries[0].shape)}")
    return TensorBlob(dtype, entries[0].shape, data[start:])


def _is_finite(dtype: str, data: bytes) -> bool:
    """Return whether no exponent is all ones."""
    windows = range(0, len(data), _WINDOW_BYTES)
    return all(_is_window_finite(dtype, data[at : at + _WINDOW_BYTES]) for at in windows)


def _is_window_finite(dtype: str, data: bytes) -> bool:
    if dtype == "float16":
        return 1 not in data[1::2].translate(_flags(0x7C))
    size = BYTES_BY_DTYPE[dtype]
    high = data[size - 1 :: size].translate(_flags(0x7F))
    low = data[size - 2 :: size].translate(_flags(0x80))
    return not int.from_bytes(high, "big") & int.from_bytes(low, "big")


def _flags(mask: int) -> bytes:
    """A translation table: 1 for bytes with all bits of the mask."""
    return bytes((byte & mask) == mask for byte in range(256))
