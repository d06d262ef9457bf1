"""Quantized experts: the form that they have in memory, families, batches, preemption."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine.test_quantized import SCORED, check, outcome
from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.experts import coded_experts, stacks_of
from tests.fakes.general_models import GENERAL, HEADS
from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import Scheme, write_checkpoint, write_fp8
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import prompt_of
from tests.ops.native import needs_native
from tokenmesh.kernels.linear.formats.round import Rounding
from tokenmesh.kernels.native import CodedExperts, has_started
from tokenmesh.shared.errors import CheckpointError

SIZES: Final = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 2},
    **{"moe_intermediate_size": 32, "intermediate_size": 96},
}
FP8_BLOCK: Final = Scheme(
    {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"},
    write_fp8(32, 32, "weight_scale_inv"),
)
"""Blocks that the kernels take, as those of 128 are."""
CASES: Final = {
    "mixtral": SCHEMES["awq"],
    "qwen2_moe": SCHEMES["pack4_zeros"],
    "deepseek_v3": FP8_BLOCK,
    "qwen3_next": SCHEMES["int8"],
}
ROUNDINGS: Final = ("int8", "int4", "fp8")
STORED: Final = ("pack4", "int8", "gptq_desc_act", "fp8_tensor")
"""Formats whose experts the kernels compute with, in addition to those of CASES."""


def source_of(family: str, tmp_path: Path) -> Path:
    entry = GENERAL[family]
    sizes = {**entry.sizes, **{key: SIZES[key] for key in SIZES if _has(entry, key)}}
    fake = Fake(entry.family, sizes, entry.rope, entry.config)
    make_fake(fake, HEADS).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def _has(entry: Fake, key: str) -> bool:
    return key in entry.sizes or key in ("intermediate_size", "num_local_experts")


def written(family: str, scheme: Scheme, tmp_path: Path) -> tuple[Path, Path]:
    """A quantized checkpoint and the plain one that it stands for."""
    pair = tmp_path / "quantized", tmp_path / "plain"
    write_checkpoint(source_of(family, tmp_path), *pair, scheme)
    return pair


@pytest.mark.parametrize("family", CASES)
def test_a_family_computes_what_its_plain_weights_do(tmp_path: Path, family: str) -> None:
    quantized, plain = written(family, CASES[family], tmp_path)
    driver = EngineDriver(quantized, max_num_batched_tokens=11)
    if has_started():
        coded_experts(driver.model)
    prompt = prompt_of(40)
    (seen,) = driver.run([Job(prompt, SCORED)])
    oracle: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *seen.token_ids[:-1]]])).logits[0]
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == seen.token_ids
    assert seen.prompt_logprobs is not None
    best = logits.log_softmax(-1)[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])
    found = [each.logprob for each in seen.prompt_logprobs if each is not None]
    torch.testing.assert_close(torch.tensor(found), best[:, 0], atol=1e-3, rtol=0)


@needs_native
@pytest.mark.parametrize(
    "scheme",
    [
        each if each == "fp8_channel" else pytest.param(each, marks=pytest.mark.slow)
        for each in STORED
    ],
)
def test_a_format_is_that_of_the_experts_in_memory(tmp_path: Path, scheme: str) -> None:
    quantized, _ = written("qwen3_moe", SCHEMES[scheme], tmp_path)
    bits = {
        part.arguments.bits for each in coded_experts(load(quantized)[0]) for part in each.parts
    }
    assert bits == {4 if scheme in ("pack4", "gptq_desc_act") else 8}


@needs_native
@pytest.mark.parametrize(
    ("family", "rounding"),
    [
        ("gpt_oss", "int4"),
        *(pytest.param("gpt_oss", each, marks=pytest.mark.slow) for each in ("int8", "fp8")),
        *(
            pytest.param("mixtral", each, marks=pytest.mark.slow)
            for each in ("int8", "int4", "fp8")
        ),
    ],
)
def test_plain_experts_are_rounded_when_they_are_loaded(
    tmp_path: Path, family: str, rounding: Rounding
) -> None:
    loaded, _ = load(source_of(family, tmp_path), quantization=rounding)
    bits = {part.arguments.bits for each in coded_experts(loaded) for part in each.parts}
    assert bits == {4 if rounding == "int4" else 8}


@needs_native
def test_experts_that_the_configuration_ignores_stay_plain(tmp_path: Path) -> None:
    scheme = SCHEMES["pack4"]
    quantized, plain = written("qwen3_moe", scheme, tmp_path)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*down_proj")
    (quantized / "config.json").write_text(json.dumps(config))
    tensors, whole = (
        load_file(quantized / "model.safetensors"),
        load_file(plain / "model.safetensors"),
    )
    for name, weight in whole.items():
        if name.endswith("down_proj.weight"):
            module = name.removesuffix(".weight")
            tensors = {key: each for key, each in tensors.items() if not key.startswith(module)}
            tensors[name] = weight
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    check(quantized, plain)
    kinds = [isinstance(each, CodedExperts) for each in stacks_of(load(quantized)[0])]
    assert kinds == [True, False] * (len(kinds) // 2)


@needs_native
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_batches_chunks_and_preemption_change_no_token(tmp_path: Path, dtype: Any) -> None:
    quantized, _ = written("qwen3_moe", SCHEMES["pack4_zeros"], tmp_path)
    jobs = [Job(prompt_of(20 + 3 * n, seed=n), greedy(24)) for n in range(4)]
    driver = EngineDriver(quantized, dtype=dtype, max_num_batched_tokens=64, block_size=4)
    alone = [driver.again().tokens([job])[0] for job in jobs]
    assert driver.again(max_num_batched_tokens=7).tokens(jobs) == alone
    outcomes = driver.again(num_blocks=24).run(jobs, steps_between=2)
    assert [each.token_ids for each in outcomes] == alone
    assert sum(each.num_preemptions for each in outcomes) > 0


def test_bfloat16_is_within_the_rounding_of_activations(tmp_path: Path) -> None:
    quantized, plain = written("qwen3_moe", SCHEMES["pack4_zeros"], tmp_path)
    expected = torch.tensor(outcome(plain, prompt_of(40))[1])
    (seen,) = EngineDriver(quantized, dtype="bfloat16").run([Job(prompt_of(40), SCORED)])
    assert seen.prompt_logprobs is not None
    found = torch.tensor([each.logprob for each in seen.prompt_logprobs if each is not None])
    # a token that takes another expert is farther away
    assert float(((found - expected).abs() / expected.abs().mean()).median()) < 3e-2


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("weight_scale", "has no weight_scale next to it"),
        ("weight_packed", "missing tensors: "),
        ("weight_shape", "has no weight_shape next to it"),
    ],
)
def test_an_expert_that_lacks_a_part_is_named(tmp_path: Path, part: str, problem: str) -> None:
    quantized, _ = written("qwen3_moe", SCHEMES["pack4"], tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    module = "model.layers.1.mlp.experts.3.up_proj"
    del tensors[f"{module}.{part}"]
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        load(quantized)
    assert problem in error.value.message
    assert module in error.value.message
