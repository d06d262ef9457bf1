"""TensorBlob: a tensor as bytes, without torch or numpy, so that every service can pass one on.

Layout: magic `TMT1`, u32 little-endian header length, JSON header {"dtype", "shape"}, then the
elements in C order, little-endian.
"""

import math
import struct
from collections.abc import Mapping
from typing import Final

import msgspec

from tokenmesh.shared.errors import ProtocolError

MAGIC: Final = b"TMT1"
MAX_HEADER_BYTES: Final = 4096
MAX_DIMENSIONS: Final = 8

BYTES_BY_DTYPE: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}
"""Names as torch prints them after `torch.`."""

_LENGTH: Final = struct.Struct("<I")


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]


_header_decoder: Final = msgspec.json.Decoder(_Header)


class TensorBlob(msgspec.Struct, frozen=True):
    """Elements, their type and their shape. `data` may be a view into the bytes it came from."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def encode(self) -> bytes:
        """The blob's bytes. Raises ProtocolError when data and shape disagree."""
        _check(self.dtype, self.shape, len(self.data))
        header = msgspec.json.encode(_Header(self.dtype, self.shape))
        return b"".join((MAGIC, _LENGTH.pack(len(header)), header, self.data))


def decode(blob: bytes) -> TensorBlob:
    """Read what `TensorBlob.encode` made, without copying the elements. Raises ProtocolError."""
    start = len(MAGIC) + _LENGTH.size
    if len(blob) < start or not blob.startswith(MAGIC):
        raise ProtocolError("these bytes are not a tensor blob")
    (header_bytes,) = _LENGTH.unpack_from(blob, len(MAGIC))
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"tensor blob with a header of {header_bytes} bytes")
    try:
        header = _header_decoder.decode(blob[start : start + header_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"tensor blob with a broken header: {error}") from error
    data = memoryview(blob)[start + header_bytes :]
    _check(header.dtype, header.shape, len(data))
    return TensorBlob(dtype=header.dtype, shape=header.shape, data=data)


def _check(dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    item_bytes = BYTES_BY_DTYPE.get(dtype)
    if item_bytes is None:
        raise ProtocolError(f"tensor blob of unknown dtype {dtype!r}")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ProtocolError(f"tensor blob of impossible shape {shape}")
    expected = math.prod(shape) * item_bytes
    if num_bytes != expected:
        raise ProtocolError(f"tensor blob {dtype}{shape} needs {expected} bytes, has {num_bytes}")


NAMED_MAGIC: Final = b"TMN1"
MAX_NAMED: Final = 32


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


_entries_decoder: Final = msgspec.json.Decoder(list[_Entry])


def encode_named(tensors: Mapping[str, TensorBlob]) -> bytes:
    """Several tensors in one blob, laid out like one with the magic `TMN1` and a list of
    [name, dtype, shape] as header. Raises ProtocolError when data and shape disagree."""
    for blob in tensors.values():
        _check(blob.dtype, blob.shape, len(blob.data))
    entries = [_Entry(name, blob.dtype, blob.shape) for name, blob in tensors.items()]
    header = msgspec.json.encode(entries)
    data = [blob.data for blob in tensors.values()]
    return b"".join((NAMED_MAGIC, _LENGTH.pack(len(header)), header, *data))


def decode_named(blob: bytes) -> dict[str, TensorBlob]:
    """Read what `encode_named` made, without copying the elements. Raises ProtocolError."""
    start = len(NAMED_MAGIC) + _LENGTH.size
    if len(blob) < start or not blob.startswith(NAMED_MAGIC):
        raise ProtocolError("these bytes are not a blob of named tensors")
    (header_bytes,) = _LENGTH.unpack_from(blob, len(NAMED_MAGIC))
    if header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"blob of named tensors with a header of {header_bytes} bytes")
    try:
        entries = _entries_decoder.decode(blob[start : start + header_bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"blob of named tensors with a broken header: {error}") from error
    if len(entries) > MAX_NAMED or len({entry.name for entry in entries}) < len(entries):
        raise ProtocolError(f"blob of {len(entries)} named tensors, or two of one name")
    tensors, view, first = {}, memoryview(blob), start + header_bytes
    for entry in entries:
        end = first + BYTES_BY_DTYPE.get(entry.dtype, 0) * math.prod(entry.shape)
        data = view[first : max(first, end)]
        _check(entry.dtype, entry.shape, len(data))
        tensors[entry.name] = TensorBlob(entry.dtype, entry.shape, data)
        first = end
    if first != len(blob):
        raise ProtocolError("blob of named tensors with bytes left over")
    return tensors
