"""Tensors from clients: files that safetensors writes, pickles and hostile ones."""

import io
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tokenmesh.services.gateway.apis.openai.tensor_upload import read_tensor
from tokenmesh.shared.tensor_blob import TensorBlob

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def torch_file(value: Any, is_zip: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=is_zip)
    return buffer.getvalue()


def tensor_of(blob: TensorBlob) -> torch.Tensor:
    dtype = getattr(torch, blob.dtype)
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).view(blob.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (5, 7), (6,)])
def test_a_file_gives_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert torch.equal(tensor_of(read_tensor(save({"any": tensor}))), tensor)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_torch_file_is_refused_with_the_call_that_converts_it(is_zip: bool) -> None:
    tensor = torch.randn(3, 4).T
    with pytest.raises(ValueError, match="a pickle, which is never read") as caught:
        read_tensor(torch_file(tensor, is_zip))
    call = str(caught.value).partition("send the bytes of ")[2]
    assert call == 'safetensors.torch.save({"x": tensor.contiguous()})'
    assert torch.equal(tensor_of(read_tensor(save({"x": tensor.contiguous()}))), tensor)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file"),
        (b"abc" * 100, "not a safetensors file"),
        (save({"a": torch.tensor([1.0, float("nan")])}), "finite"),
        (save({"a": torch.tensor([1.0, float("inf")]).half()}), "finite"),
        (save({"a": torch.tensor([-float("inf"), 1.0]).bfloat16()}), "finite"),
        (save({"a": torch.ones(1), "b": torch.ones(1)}), "2 tensors"),
        (save({"a": torch.ones(1, dtype=torch.float64)}), "F64"),
        (save({"a": torch.ones(4)})[:-1], "fill"),
    ],
)
def test_anything_but_a_tensor_of_finite_floats_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tensor(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 65_535, 65_536, 131_072, 299_999])
def test_one_infinity_anywhere_in_a_large_tensor_is_refused(dtype: torch.dtype, place: int) -> None:
    values = torch.ones(300_000, dtype=dtype)
    read_tensor(save({"a": values}))
    values[place] = float("-inf")
    with pytest.raises(ValueError, match="finite"):
        read_tensor(save({"a": values}))


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_changed_byte_gives_a_tensor_or_a_reason(place: int, value: int) -> None:
    data = bytearray(save({"a": torch.ones(2, 3)}))
    data[place % len(data)] = value
    with suppress(ValueError):
        blob = read_tensor(bytes(data))
        assert isinstance(blob, TensorBlob)
        blob.encode()
