"""read_tensor: the one tensor of a file that a client sent, as a TensorBlob.

A pickle of `torch.save` is a program. Only the few operations of a plain tensor are accepted, and
they make inert records: nothing is imported, called or constructed.
"""

import math
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from tokenmesh.shared.tensor_blob import BYTES_BY_DTYPE, TensorBlob

MAX_BYTES: Final = 16 * 1024
"""The description of one tensor has a few hundred bytes."""


class PickledName(NamedTuple):
    """The name of something importable."""

    module: str
    name: str


class PickledReference(NamedTuple):
    """A reference to data outside the pickle."""

    facts: Any


class PickledCall(NamedTuple):
    """A call that unpickling would make."""

    function: Any
    arguments: Any


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """Where a tensor lies in its storage."""

    storage_type: str
    """Such as FloatStorage."""
    key: str
    """The name of the storage's file."""
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_MARK: Final = object()
_NUMBERS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"})
_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANTS: Final = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}
_REBUILD: Final = PickledName("torch._utils", "_rebuild_tensor_v2")


def describe(data: bytes) -> TensorDescription:
    """Raises ValueError for anything but exactly one tensor."""
    if len(data) > MAX_BYTES:
        raise ValueError("it holds more than one tensor")
    match _interpret(data):
        case PickledCall(
            function,
            (
                PickledReference(
                    ("storage", PickledName("torch", storage_type), str(key), str(), int())
                ),
                int(offset),
                tuple(shape),
                tuple(strides),
                bool(),
                PickledCall(PickledName("collections", "OrderedDict"), ()),
            ),
        ) if function == _REBUILD and all(type(n) is int for n in (*shape, *strides)):
            return TensorDescription(storage_type, key, offset, shape, strides)
    raise ValueError("it holds something other than one plain tensor")


def _interpret(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name == "STOP":
                return stack.pop()
            _apply(operation.name, argument, stack, memo)
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError("its description is broken") from error
    raise ValueError("its description has no end")


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in ("PROTO", "FRAME"):
        return
    if name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _NUMBERS:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name == "GLOBAL":
        stack.append(PickledName(*argument.split(" ", 1)))
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "TUPLE":
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        stack[start:] = [tuple(stack[start + 1 :])]
    elif name in _TUPLES:
        start = len(stack) - _TUPLES[name]
        stack[start:] = [tuple(stack[start:])]
    elif name == "BINPERSID":
        stack.append(PickledReference(stack.pop()))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(PickledCall(stack.pop(), arguments))
    else:
        raise ValueError(f"it holds a {name}, which no plain tensor has")


_ZIP: Final = b"PK\x03\x04"
_BROKEN: Final = (
    zipfile.BadZipFile,
    KeyError,
    NotImplementedError,
    RuntimeError,
    OSError,
    EOFError,
    OverflowError,
)
"""Errors of `zipfile` for a broken file."""
_STORAGES: Final = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH: Final = struct.Struct("<Q")
_MAX_HEADER_BYTES: Final = 16 * 1024
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
    blob = _read_torch(data) if data.startswith(_ZIP) else _read_safetensors(data)
    if not _is_finite(blob.dtype, bytes(blob.data)):
        raise ValueError("it holds numbers that are not finite")
    return blob


def _read_torch(data: bytes) -> TensorBlob:
    """A file of torch.save: a zip of files that are never compressed."""
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
                raise ValueError("its files are compressed")
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise ValueError("it is a zip that torch.save has not written")
            folder = names[0].removesuffix("data.pkl")
            if folder + "byteorder" in archive.namelist():
                order = archive.read(folder + "byteorder")
                if order != b"little":
                    raise ValueError("its bytes are not in little-endian order")
            found = describe(archive.read(names[0]))
            return _cut(found, archive.read(f"{folder}data/{found.key}"))
    except _BROKEN as error:
        raise ValueError(f"it is a broken zip: {error}") from error


def _cut(found: TensorDescription, storage: bytes) -> TensorBlob:
    dtype = _STORAGES.get(found.storage_type)
    if dtype is None:
        raise ValueError(f"it is a tensor of {found.storage_type}, not of floats")
    sizes = found.shape[::-1]
    strides = tuple(accumulate(sizes[:-1], lambda a, b: a * b, initial=1))[::-1]
    if found.strides != strides[-len(found.shape) :] or min(found.offset, *sizes, 0) < 0:
        raise ValueError("it is not contiguous: save tensor.contiguous()")
    if max(found.offset, *sizes, 0) > _MOST:
        raise ValueError("it is too large")
    size = BYTES_BY_DTYPE[dtype]
    start, length = found.offset * size, math.prod(found.shape) * size
    if start + length > len(storage):
        raise ValueError("its storage is too short")
    return TensorBlob(dtype, found.shape, storage[start : start + length])


def _read_safetensors(data: bytes) -> TensorBlob:
    if len(data) < _LENGTH.size:
        raise ValueError("it is neither a file of torch.save nor of safetensors")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(data):
        raise ValueError("it is neither a file of torch.save nor of safetensors")
    try:
        header = _header_decoder.decode(data[_LENGTH.size : start])
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
    """Whether no exponent is all ones; tests all elements at once."""
    if dtype == "float16":
        return 1 not in data[1::2].translate(_flags(0x7C))
    size = BYTES_BY_DTYPE[dtype]
    high = data[size - 1 :: size].translate(_flags(0x7F))
    low = data[size - 2 :: size].translate(_flags(0x80))
    return not int.from_bytes(high, "big") & int.from_bytes(low, "big")


def _flags(mask: int) -> bytes:
    """A translation table: 1 for bytes with all bits of the mask."""
    return bytes((byte & mask) == mask for byte in range(256))
