"""Tensor blobs: round trips and everything that must not decode."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.tensor_blob import (
    BYTES_BY_DTYPE,
    MAGIC,
    NAMED_MAGIC,
    TensorBlob,
    decode,
    decode_named,
    encode_named,
)


@given(
    st.sampled_from(sorted(BYTES_BY_DTYPE)),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
)
def test_tensor_survives_the_wire(dtype: str, shape: tuple[int, ...]) -> None:
    size = BYTES_BY_DTYPE[dtype]
    for extent in shape:
        size *= extent
    data = bytes(index % 251 for index in range(size))
    back = decode(TensorBlob(dtype, shape, data).encode())
    assert (back.dtype, back.shape, bytes(back.data)) == (dtype, shape, data)


def test_decoded_elements_are_not_copied() -> None:
    pixels = np.arange(12, dtype=np.float32).reshape(3, 4)
    blob = TensorBlob("float32", pixels.shape, pixels.tobytes()).encode()
    back = decode(blob)
    assert isinstance(back.data, memoryview)
    assert back.data.obj is blob
    np.testing.assert_array_equal(np.frombuffer(back.data, np.float32).reshape(back.shape), pixels)


def header(text: bytes, data: bytes = b"") -> bytes:
    return MAGIC + struct.pack("<I", len(text)) + text + data


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"TMT1",
        b"PNG1" + b"\0" * 20,
        header(b"not json"),
        header(b"\xff\xfe"),
        header(b'{"dtype": "float32"}'),
        header(b'{"dtype": "complex64", "shape": []}', b"\0" * 8),
        header(b'{"dtype": "float32", "shape": [2]}', b"\0" * 7),
        header(b'{"dtype": "float32", "shape": [-1]}'),
        header(b'{"dtype": "float32", "shape": [-1, -1]}', b"\0" * 4),
        header(b'{"dtype": "uint8", "shape": [1,1,1,1,1,1,1,1,1]}', b"\0"),
        header(b'{"dtype": "uint8", "shape": [1], "more": 1}', b"\0"),
        MAGIC + struct.pack("<I", 2**31) + b"{}",
        header(b"[" * 4000),
    ],
)
def test_anything_else_is_a_protocol_error(blob: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(blob)


@given(st.binary(max_size=100))
def test_junk_never_decodes(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)
    with pytest.raises(ProtocolError):
        decode(header(data))


def test_wrong_length_is_refused_by_the_sender_too() -> None:
    with pytest.raises(ProtocolError):
        TensorBlob("float32", (2, 2), b"\0" * 15).encode()


def test_named_tensors_survive_the_wire_and_are_not_copied() -> None:
    tensors = {
        "pixel_values": TensorBlob("float32", (2, 3), bytes(range(24))),
        "grid": TensorBlob("int64", (1, 3), bytes(range(24))),
        "none": TensorBlob("bool", (0,), b""),
    }
    data = encode_named(tensors)
    back = decode_named(data)
    assert {name: (each.dtype, each.shape, bytes(each.data)) for name, each in back.items()} == {
        name: (each.dtype, each.shape, each.data) for name, each in tensors.items()
    }
    assert all(
        isinstance(each.data, memoryview) and each.data.obj is data for each in back.values()
    )
    assert decode_named(encode_named({})) == {}


def named(text: bytes, data: bytes = b"") -> bytes:
    return NAMED_MAGIC + struct.pack("<I", len(text)) + text + data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"TMN1",
        TensorBlob("bool", (1,), b"1").encode(),
        named(b"{}"),
        named(b"[1]"),
        named(b'[["a","float32",[1]]]', b"123"),
        named(b'[["a","float32",[1]]]', b"12345"),
        named(b'[["a","float32",[-1]]]', b""),
        named(b'[["a","int3",[1]]]', b"1"),
        named(b'[["a","bool",[1]],["a","bool",[1]]]', b"12"),
        named(b"[" + b",".join(b'["%d","bool",[0]]' % n for n in range(33)) + b"]"),
        named(b" " * 5000),
    ],
)
def test_broken_named_tensors_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_named(data)
