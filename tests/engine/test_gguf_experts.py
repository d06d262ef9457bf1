"""Mixtures of experts out of GGUF files, against the numbers that their blocks stand for."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_gguf import bytes_tokens, mixed, refusal
from tests.fakes import gguf
from tests.fakes.engine_driver import EngineDriver, Job
from tests.fakes.experts import coded_experts
from tests.fakes.general_models import HEADS
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import prompt_of
from tokenmesh.kernels.native import has_started
from tokenmesh.shared.gguf.unpack import unpacked
from tokenmesh.shared.messages.sampling import SamplingParams

SIZES: Final = {
    **{"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 2},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"intermediate_size": 256, "moe_intermediate_size": 256},
}
"""Blocks of 256 divide them."""
FAKES: Final = {
    "qwen2moe": Fake("Qwen2Moe", {**SIZES, "shared_expert_intermediate_size": 128}),
    "qwen3moe": Fake("Qwen3Moe", {**SIZES, "norm_topk_prob": True}),
    "llama": Fake("Mixtral", {**SIZES, "sliding_window": None}),
}
SCORED: Final = SamplingParams(seed=0, max_tokens=8, temperature=0.0, prompt_logprobs=1)
KINDS: Final = (gguf.q8_0, gguf.q4_0, gguf.q4_k, gguf.q6_k, gguf.half, gguf.brain)


def of_experts(kind: Callable[[torch.Tensor], gguf.Encoded]) -> Any:
    """Experts in one type, all else in several."""
    return lambda name, weight: (kind if ".experts." in name else mixed_of(name))(weight)


def mixed_of(name: str) -> Callable[[torch.Tensor], gguf.Encoded]:
    return lambda weight: mixed(name, weight)


def each_unlike(name: str, weight: torch.Tensor) -> gguf.Encoded:
    """Gate, up and down in three types, as mixtures of quantizers have them."""
    kinds = {"gate_proj": gguf.q4_k, "w1": gguf.q4_k, "up_proj": gguf.q8_0, "w3": gguf.q8_0}
    kind = kinds.get(name.split(".")[-2], gguf.q6_k)
    return kind(weight) if ".experts." in name else mixed(name, weight)


def written(tmp_path: Path, arch: str, encode: Any, **values: Any) -> tuple[Path, Path]:
    """A file, and the checkpoint of transformers that it stands for."""
    source = tmp_path / "source"
    fake = FAKES[arch]
    rope = {"rope_type": "default", "rope_theta": 300.0}
    make_fake(Fake(fake.family, fake.sizes, rope), HEADS).save_pretrained(source)
    tokens = {**bytes_tokens(320), **values}
    plain = gguf.write_model(source, tmp_path / "model.gguf", arch, encode, tokens)
    save_file(plain, source / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.gguf", source


def check(directory: Path, source: Path) -> EngineDriver:
    """The engine computes the same of both; the driver of the first."""
    seen = []
    drivers = [EngineDriver(each, max_num_batched_tokens=9) for each in (directory, source)]
    for driver in drivers:
        (result,) = driver.run([Job([i % 300 for i in prompt_of(40)], SCORED)])
        assert result.error is None
        assert result.prompt_logprobs is not None
        logprobs = [each.logprob for each in result.prompt_logprobs if each is not None]
        seen.append((result.token_ids, torch.tensor(logprobs)))
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1], seen[1][1], atol=1e-4, rtol=0)
    return drivers[0]


@pytest.mark.parametrize("arch", FAKES)
def test_experts_compute_what_their_blocks_stand_for(tmp_path: Path, arch: str) -> None:
    file, source = written(tmp_path, arch, each_unlike)
    driver = check(unpacked(file, str(tmp_path / "cache")), source)
    if has_started():
        stacks = coded_experts(driver.model)
        bits = [[part.arguments.bits for part in each.parts] for each in stacks]
        assert bits == [[4, 8] * 4, [6] * 4] * 2


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__, marks=[] if kind is gguf.half else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_each_type_of_blocks_is_read(tmp_path: Path, kind: Any) -> None:
    file, source = written(tmp_path, "qwen3moe", of_experts(kind))
    directory = unpacked(file, str(tmp_path / "cache"))
    stored = load_file(directory / "model.safetensors")
    plain = load_file(source / "model.safetensors")
    assert stored.keys() == plain.keys()
    check(directory, source)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"qwen3moe.expert_used_count": 5}, "expert_used_count is 5 of 4 experts"),
        ({"qwen3moe.expert_count": 3}, "has shape [4, 256, 256] for 3 experts"),
        ({"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2; supported is 1"),
        ({"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale is set (2.5)"),
        ({"qwen3moe.expert_group_count": 4}, "expert_group_count is set (4)"),
        ({"qwen3moe.leading_dense_block_count": 1}, "leading_dense_block_count is set"),
    ],
)
def test_metadata_of_experts_that_is_not_served_is_named(
    tmp_path: Path, values: dict[str, Any], expected: str
) -> None:
    file, _ = written(tmp_path, "qwen3moe", mixed_name, **values)
    assert expected in refusal(tmp_path, file.read_bytes())


def mixed_name(name: str, weight: torch.Tensor) -> gguf.Encoded:
    return gguf.q8_0(weight) if ".experts." in name else mixed(name, weight)


def test_weights_of_chosen_experts_are_normalized_as_the_file_says(tmp_path: Path) -> None:
    for arch, values, expected in (
        ("qwen2moe", {}, False),
        ("qwen3moe", {}, True),
        ("qwen3moe", {"qwen3moe.expert_weights_norm": False}, False),
    ):
        place = tmp_path / f"{arch}{len(values)}"
        place.mkdir()
        file, _ = written(place, arch, mixed_name, **values)
        config = json.loads((unpacked(file, str(place)) / "config.json").read_text())
        assert config["norm_topk_prob"] is expected


needs_library = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed"
)


@needs_library
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_blocks_are_those_of_the_library(kind: Any) -> None:
    from gguf import GGMLQuantizationType, dequantize

    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(0))
    number, content, stands_for = kind(weight)
    blocks = np.frombuffer(content, np.uint8).reshape(6, -1)
    found = torch.from_numpy(dequantize(blocks, GGMLQuantizationType(number)).copy())
    torch.testing.assert_close(found, stands_for, atol=1e-6, rtol=1e-5)


@needs_library
@pytest.mark.parametrize("arch", FAKES)
def test_a_file_that_the_library_writes_is_read(tmp_path: Path, arch: str) -> None:
    from gguf import (
        GGMLQuantizationType,
        GGUFReader,
        GGUFWriter,
    )

    file, source = written(tmp_path, arch, each_unlike)
    reader = GGUFReader(file)
    writer = GGUFWriter(tmp_path / "again.gguf", arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        kind = GGMLQuantizationType(tensor.tensor_type)
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check(unpacked(tmp_path / "again.gguf", str(tmp_path / "cache")), source)
