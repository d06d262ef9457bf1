"""Tensors from clients: files that torch and safetensors write, and hostile ones."""

import io
import os
import pickle
import zipfile
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


def torch_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensor_of(blob: TensorBlob) -> torch.Tensor:
    dtype = getattr(torch, blob.dtype)
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).view(blob.shape)


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"archive/{name.replace('__', '.')}", data)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (5, 7), (6,)])
def test_both_formats_give_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    for data in (torch_file(tensor), save({"any": tensor}), torch_file(tensor.requires_grad_())):
        assert torch.equal(tensor_of(read_tensor(data)), tensor.detach())


def test_a_part_of_a_larger_storage_is_cut_out() -> None:
    tensor = torch.randn(9, 4)
    assert torch.equal(tensor_of(read_tensor(torch_file(tensor[2:5]))), tensor[2:5])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "neither"),
        (b"abc" * 100, "neither"),
        (torch_file(torch.randn(4, 3).T), "contiguous"),
        (torch_file(torch.ones(2, 2, dtype=torch.int64)), "not of floats"),
        (torch_file({"a": torch.ones(2)}), "plain tensor|something else"),
        (torch_file([torch.ones(2)]), "plain tensor|something else"),
        (
            torch_file(torch.nn.Parameter(torch.ones(2))),
            "plain tensor|something else",
        ),
        (torch_file(torch.tensor([1.0, float("nan")])), "finite"),
        (torch_file(torch.tensor([1.0, float("inf")]).half()), "finite"),
        (save({"a": torch.tensor([-float("inf"), 1.0]).bfloat16()}), "finite"),
        (save({"a": torch.ones(1), "b": torch.ones(1)}), "2 tensors"),
        (save({"a": torch.ones(1, dtype=torch.float64)}), "F64"),
        (save({"a": torch.ones(4)})[:-1], "fill"),
        (zipped(nothing=b""), "torch.save"),
        (zipped(data__pkl=b"\x80\x02]q\x00."), "no plain tensor"),
        (torch_file(torch.ones(9))[:-30], "zip"),
    ],
)
def test_anything_but_a_tensor_of_finite_floats_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tensor(data)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never-made-by-a-pickle",)


def test_a_program_in_the_pickle_is_never_run() -> None:
    for protocol in range(6):
        data = zipped(data__pkl=pickle.dumps(_Evil(), protocol=protocol))
        with pytest.raises(ValueError, match="it "):
            read_tensor(data)
    assert not os.path.exists("/tmp/never-made-by-a-pickle")


def test_a_compressed_file_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10_000_000)
    with pytest.raises(ValueError, match="compressed"):
        read_tensor(buffer.getvalue())


@given(st.integers(0, 2000), st.integers(0, 255), st.sampled_from([0, 1]))
def test_a_changed_byte_gives_a_tensor_or_a_reason(place: int, value: int, kind: int) -> None:
    data = bytearray([torch_file(torch.ones(2, 3)), save({"a": torch.ones(2, 3)})][kind])
    data[place % len(data)] = value
    with suppress(ValueError):
        blob = read_tensor(bytes(data))
        assert isinstance(blob, TensorBlob)
        blob.encode()
