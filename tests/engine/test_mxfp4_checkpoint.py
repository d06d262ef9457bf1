"""Checkpoints of gpt_oss as they are published, experts in MXFP4, against transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.experts import coded_experts
from tests.fakes.general_models import GENERAL
from tests.fakes.models import Fake, make_fake
from tests.fakes.tiny import prompt_of
from tests.ops.native import needs_native
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.messages.sampling import SamplingParams

Tensors = dict[str, torch.Tensor]

QUANTIZATION: Final = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
VALUES: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCORED: Final = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=1)
BLOCKS: Final = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES: Final = "model.layers.1.mlp.experts.down_proj_scales"


def write(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A checkpoint in MXFP4, the same one with plain weights, and the model of transformers."""
    quantized, plain = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("plain")
    return quantized, plain, write_pair(quantized, plain)


def write_pair(quantized: Path, plain: Path) -> Any:
    """Write the checkpoints of `pair`; the model."""
    fake = GENERAL["gpt_oss"]
    sizes = {**fake.sizes, "intermediate_size": 96, "head_dim": 16}
    oracle = make_fake(Fake("GptOss", sizes, fake.rope))
    generator = torch.Generator().manual_seed(0)
    stored: Tensors = {}
    for name, tensor in oracle.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor.clone()
            continue
        num_experts, inputs, outputs = tensor.shape
        shape = (num_experts, outputs, inputs // 32)
        halves = torch.randint(16, (*shape, 32), generator=generator)
        scales = torch.randint(120, 124, shape, generator=generator)
        stored[f"{name}_blocks"] = (halves[..., 0::2] + 16 * halves[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = VALUES[halves] * 2.0 ** (scales - 127)[..., None]
        tensor.copy_(numbers.flatten(-2).transpose(1, 2))
    for directory in (quantized, plain):
        oracle.save_pretrained(directory)
    write(quantized, stored)
    edit_config(quantized, quantization_config=QUANTIZATION)
    return oracle


def test_its_tokens_are_those_of_the_plain_weights_and_of_transformers(
    pair: tuple[Path, Path, Any],
) -> None:
    quantized, plain, oracle = pair
    jobs = [Job(prompt_of(37), greedy(24)), Job(prompt_of(9, seed=1), greedy(24))]
    tokens = EngineDriver(quantized, max_num_batched_tokens=7).tokens(jobs)
    assert tokens == EngineDriver(plain, max_num_batched_tokens=7).tokens(jobs)
    for job, ours in zip(jobs, tokens, strict=True):
        ids = torch.tensor([[*job.prompt, *ours[:-1]]])
        with torch.no_grad():
            logits = oracle(ids).logits[0, len(job.prompt) - 1 :]
        assert logits.argmax(-1).tolist() == ours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_logits_are_those_of_the_plain_weights(
    pair: tuple[Path, Path, Any], dtype: Any
) -> None:
    seen = []
    for directory in pair[:2]:
        (outcome,) = EngineDriver(directory, dtype=dtype).run([Job(prompt_of(30), SCORED)])
        assert outcome.prompt_logprobs is not None
        scored = [each for each in outcome.prompt_logprobs if each is not None]
        seen.append(([each.token_id for each in scored], [each.logprob for each in scored]))
    ours, plain = (torch.tensor(logprobs) for _, logprobs in seen)
    assert len(set(seen[0][1])) > 20
    if dtype == "float32":
        assert seen[0][0] == seen[1][0]
        torch.testing.assert_close(ours, plain, atol=5e-5, rtol=0)
        return
    # activations are rounded; a token that takes another expert is farther away
    assert float(((ours - plain).abs() / plain.abs().mean()).median()) < 3e-2


@needs_native
def test_its_experts_stay_in_four_bits(pair: tuple[Path, Path, Any]) -> None:
    stacks = coded_experts(load(pair[0])[0])
    assert {part.arguments.bits for each in stacks for part in each.parts} == {4}


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without(SCALES), f"tensor {BLOCKS} has no scales next to it"),
        (_without(BLOCKS), f"tensor {SCALES} has type U8; supported are F32, F16, BF16"),
        (
            lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].clone()}),
            f"tensor {BLOCKS} has shape [8, 64, 3, 8], not [experts, outputs, inputs / 32, 16]",
        ),
        (
            lambda t: t.update({SCALES: t[SCALES][:, :, :2].clone()}),
            f"tensor {SCALES} has shape [8, 64, 2]; {BLOCKS} asks for [8, 64, 3]",
        ),
        (
            lambda t: t.update({n: t[n][:, :63].clone() for n in (BLOCKS, SCALES)}),
            "down_proj has shape [8, 96, 63]; config.json asks for [8, 96, 64]",
        ),
        (
            lambda t: t[SCALES][3].fill_(255),
            "experts.down_proj has numbers that torch.float32 cannot hold, in expert 3",
        ),
        (
            lambda t: t.update({BLOCKS: t[BLOCKS].to(torch.int8)}),
            f"tensor {BLOCKS} has type I8; supported are F32, F16, BF16",
        ),
        (
            lambda t: (t.pop(BLOCKS), t.pop(SCALES)),
            "missing tensors: model.layers.1.mlp.experts.down_proj",
        ),
    ],
    ids=["scales", "blocks", "bytes", "groups", "shape", "nan", "type", "both"],
)
def test_blocks_and_scales_that_do_not_fit_are_named(
    pair: tuple[Path, Path, Any],
    tmp_path: Path,
    damage: Callable[[Tensors], object],
    message: str,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(pair[0], directory)
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    write(directory, tensors)
    with pytest.raises(CheckpointError) as error:
        EngineDriver(directory)
    assert message in error.value.message
    assert str(directory) in error.value.message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "has type U8; supported are F32, F16"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'; supported are"),
        ({"quantization_config": {}}, "quantization_config: quant_method is None; supported are"),
        ({"quantization_config": None}, "has type U8; supported are F32, F16, BF16"),
    ],
    ids=["fp8", "hqq", "empty", "none"],
)
def test_no_other_quantization_is_taken_for_it(
    pair: tuple[Path, Path, Any], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(pair[0], directory)
    edit_config(directory, **values)
    with pytest.raises(CheckpointError) as error:
        EngineDriver(directory)
    assert message in error.value.message
