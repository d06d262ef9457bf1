"""Weights that the library of a format has written: our reading of them is the library's.

Optional: `pip install --no-deps --target FOLDER compressed-tensors loguru bitsandbytes gguf`, and
the sources of autoawq, which newer versions of transformers break beyond its layers. The other
tests write the same formats themselves.
"""

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.quantized_schemes import compressed, floating, integer
from tokenmesh.engine.models.quantization import read_quantization
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.linear.formats import Awq, Bnb4, Bnb8, Codes, Format, Part
from tokenmesh.kernels.linear.formats.gguf import LAYOUTS, GgufBlocks
from tokenmesh.shared.errors import CheckpointError


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


def check(form: Format, stored: dict[str, torch.Tensor], expected: torch.Tensor) -> Codes | None:
    """The numbers and the shape are the library's; returns the codes, whose numbers are too."""
    parts = {
        name: Part(name, each.dtype, tuple(each.shape), partial(stored.__getitem__, name))
        for name, each in stored.items()
    }
    assert form.shape_of(parts) == tuple(expected.shape)
    torch.testing.assert_close(form.reference(stored), expected.float(), atol=1e-6, rtol=1e-5)
    codes = form.codes(stored)
    if codes is not None:
        torch.testing.assert_close(codes.decoded(), expected.float(), atol=1e-6, rtol=1e-5)
    return codes


pytestmark = pytest.mark.timeout(120)
"""Their imports take seconds."""
ROWS, COLUMNS = 64, 96
SCALES = {
    "tensor": (1,),
    "channel": (ROWS, 1),
    "group": (ROWS, COLUMNS // 32),
    "block": (ROWS // 32, COLUMNS // 32),
}


@needs("compressed_tensors")
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("pack-quantized", integer(4, "group", group_size=32)),
        ("pack-quantized", {**integer(4, "group", group_size=32), "symmetric": False}),
        ("pack-quantized", integer(4, "channel")),
        ("pack-quantized", integer(8, "group", group_size=32)),
        ("pack-quantized", {**integer(8, "channel"), "symmetric": False}),
        ("int-quantized", integer(8, "channel")),
        ("int-quantized", integer(8, "tensor")),
        ("float-quantized", floating(8, "tensor")),
        ("float-quantized", floating(8, "channel")),
        ("float-quantized", floating(8, "block", block_structure=[32, 32])),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each['num_bits']}-{each['strategy']}",
)
def test_numbers_are_those_of_compressed_tensors(form: str, weights: dict[str, Any]) -> None:
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationArgs,
        QuantizationScheme,
    )

    torch.manual_seed(0)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    shape = SCALES[weights["strategy"]]
    largest = 448 if weights["type"] == "float" else (1 << (weights["num_bits"] - 1)) - 1
    state = {
        "weight": torch.randn(ROWS, COLUMNS),
        "weight_scale": (torch.rand(shape) + 1.5) / largest,
    }
    if not weights["symmetric"]:
        state["weight_zero_point"] = torch.randint(-3, 4, shape, dtype=torch.int8)
    library = BaseCompressor.get_value_from_registry(form)
    stored = library.compress(state, scheme)
    expected = library.decompress(stored, scheme)["weight"]
    config = {"quantization_config": compressed(form, weights)}
    how = read_quantization(RawConfig(config, str(Path("config.json"))))
    assert how is not None
    ours = how.format_of("model.layers.0.mlp.experts.3.up_proj")
    assert ours is not None
    assert check(ours, stored, expected) is not None


@needs("bitsandbytes")
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [64, 128])
def test_numbers_are_those_of_bitsandbytes(kind: str, is_nested: bool, blocksize: int) -> None:
    from bitsandbytes import functional  # type: ignore[import-not-found]

    torch.manual_seed(0)
    packed, state = functional.quantize_4bit(
        torch.randn(256, 384),
        blocksize=blocksize,
        compress_statistics=is_nested,
        quant_type=kind,
    )
    stored = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    expected = functional.dequantize_4bit(packed, state)
    assert ("weight.nested_absmax" in stored) == is_nested
    check(Bnb4(kind), {"weight": packed, **stored}, expected)


@needs("bitsandbytes")
def test_rows_of_int8_are_those_of_bitsandbytes() -> None:
    from bitsandbytes import functional

    torch.manual_seed(0)
    weight = torch.randn(48, 96).half()
    numbers, scales, _ = functional.int8_vectorwise_quant(weight)
    expected = functional.int8_vectorwise_dequant(numbers, scales)
    assert check(Bnb8(), {"weight": numbers, "SCB": scales}, expected) is not None


@needs("gguf")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_are_those_of_gguf(kind: str) -> None:
    from gguf import GGMLQuantizationType, quants

    layout = LAYOUTS[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (6, 3, layout.size), dtype=np.uint8)
    # whatever lies in bytes of numbers is valid; bytes of factors are halves, which may be infinite
    halves = random.normal(size=(6, 3, 2)).astype(np.float16).view(np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    places |= {"Q2_K": (80, 82), "Q3_K": (108,)}
    for number, place in enumerate(places.get(kind, (0,))):
        blocks[..., place : place + 2] = halves[..., 2 * number : 2 * number + 2]
    if kind == "MXFP4":
        blocks[..., 0] = random.integers(110, 140, (6, 3))
    stored = blocks.reshape(6, -1)
    expected = quants.dequantize(stored, GGMLQuantizationType[kind])
    assert check(GgufBlocks(kind), {"weight": torch.from_numpy(stored)}, torch.from_numpy(expected))


def _of_awq(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Any]:
    """Modules of the library, without its package's __init__, which imports its models."""
    found = importlib.util.find_spec("awq")
    assert found is not None
    root = next(iter(found.submodule_search_locations or ()))
    for package in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        module = ModuleType(package)
        module.__path__ = [str(Path(root).joinpath(*package.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, package, module)
    return [importlib.import_module(name) for name in names]


@needs("awq")
@pytest.mark.parametrize("group_size", [32, 64])
def test_numbers_are_those_of_autoawq(monkeypatch: pytest.MonkeyPatch, group_size: int) -> None:
    names = "awq.modules.linear.gemm", "awq.utils.packing_utils"
    gemm, packing = _of_awq(monkeypatch, *names)
    torch.manual_seed(0)
    layer = torch.nn.Linear(192, 96, bias=False).half()
    wide = layer.weight.data.float().view(96, -1, group_size)
    low, high = wide.amin(-1), wide.amax(-1)
    # the library does not cut numbers off at 15
    scales = ((high - low) / 14).half()
    zeros = (-low / scales.float()).round()
    written = gemm.WQLinear_GEMM.from_linear(
        layer, 4, group_size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    stored = {name: getattr(written, name) for name in ("qweight", "qzeros", "scales")}
    expected = packing.dequantize_gemm(*stored.values(), 4, group_size).t()
    torch.testing.assert_close(expected.float(), layer.weight.float(), atol=2e-2, rtol=0)
    # theirs are products in float16
    form = Awq(group_size)
    torch.testing.assert_close(form.reference(stored), expected.float(), atol=2e-4, rtol=1e-3)
    assert form.codes(stored) is not None


def test_a_checkpoint_of_torchao_is_refused_by_name() -> None:
    config = {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}
    with pytest.raises(CheckpointError, match=r"quant_method is 'torchao'; supported are awq"):
        read_quantization(RawConfig(config, "config.json"))
