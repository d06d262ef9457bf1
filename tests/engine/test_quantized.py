"""Quantized checkpoints against the same model with the numbers that their tensors stand for."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import GENERAL, HEADS
from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import shard, write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.quantization import read_quantization
from tokenmesh.services.worker_svc.models.raw_config import read_json
from tokenmesh.shared.messages.sampling import SamplingParams

SIZES: Final = {"intermediate_size": 96, "num_hidden_layers": 2}
"""Numbers that groups of 32 and words of 3 bits divide."""
FAMILIES: Final = {
    "qwen2": Fake("Qwen2", SIZES),
    "qwen3_moe": Fake(
        "Qwen3Moe",
        {**GENERAL["qwen3_moe"].sizes, **SIZES, "num_experts": 4, "moe_intermediate_size": 32},
    ),
}
SCORED: Final = SamplingParams(seed=0, max_tokens=8, temperature=0.0, prompt_logprobs=1)

Written = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Family and scheme -> a quantized checkpoint and the plain one that it stands for."""

    @cache
    def source(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        make_fake(FAMILIES[family], HEADS).save_pretrained(directory)
        return directory

    @cache
    def get(family: str, scheme: str) -> tuple[Path, Path]:
        directory = tmp_path_factory.mktemp(f"{family}-{scheme}")
        pair = directory / "quantized", directory / "plain"
        write_checkpoint(source(family), *pair, SCHEMES[scheme])
        return pair

    return get


def outcome(directory: Path, prompt: list[int]) -> tuple[list[int], list[float], list[int]]:
    """Greedy tokens, and the best token and its log probability at each place of the prompt."""
    (seen,) = EngineDriver(directory).run([Job(prompt, SCORED)])
    assert seen.error is None
    assert seen.prompt_logprobs is not None
    scored = [each for each in seen.prompt_logprobs if each is not None]
    return seen.token_ids, [each.logprob for each in scored], [each.token_id for each in scored]


def check(quantized: Path, plain: Path) -> None:
    """The engine computes the same of both, and transformers the same tokens of the plain one."""
    prompt = prompt_of(40)
    tokens, logprobs, ids = outcome(quantized, prompt)
    expected, expected_logprobs, expected_ids = outcome(plain, prompt)
    assert (tokens, ids) == (expected, expected_ids)
    torch.testing.assert_close(
        torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=1e-5, rtol=0
    )
    oracle: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_is_what_the_format_says(written: Written, family: str, scheme: str) -> None:
    quantized, plain = written(family, scheme)
    how = read_quantization(read_json(quantized / "config.json"))
    assert how is not None
    checkpoint = Checkpoint(quantized)
    checkpoint.decode(how)
    expected = load_file(plain / "model.safetensors")
    assert checkpoint.shapes() == {name: tuple(each.shape) for name, each in expected.items()}
    for name, weight in expected.items():
        ours = checkpoint.take(name, tuple(weight.shape), torch.float32)
        torch.testing.assert_close(ours, weight, atol=1e-7, rtol=1e-6)
    checkpoint.finish(())
    assert checkpoint.bytes_read == checkpoint.num_bytes(())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_native_model_computes_what_its_plain_weights_do(written: Written, scheme: str) -> None:
    check(*written("qwen2", scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_general_model_computes_what_its_plain_weights_do(written: Written, scheme: str) -> None:
    check(*written("qwen3_moe", scheme))


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma3_text"])
def test_other_families_of_the_general_kind_do_so_too(
    tiny: Tiny, tmp_path: Path, family: str
) -> None:
    pair = tmp_path / "quantized", tmp_path / "plain"
    write_checkpoint(tiny(family).directory, *pair, SCHEMES["fp8_block"])
    assert sum(".mlp." in name for name in Checkpoint(pair[0]).shapes()) > 6
    check(*pair)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_parts_of_a_weight_may_lie_in_several_files(
    written: Written, tmp_path: Path, family: str
) -> None:
    quantized, plain = written(family, "gptq4")
    for file in quantized.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard(tmp_path, 3)
    jobs = [Job(prompt_of(30), greedy(8))]
    assert EngineDriver(tmp_path).tokens(jobs) == EngineDriver(plain).tokens(jobs)


def test_a_half_precision_model_holds_the_rounded_weights(written: Written) -> None:
    quantized, plain = written("qwen2", "pack4")
    jobs = [Job(prompt_of(30), SCORED)]
    seen = []
    for directory in (quantized, plain):
        (result,) = EngineDriver(directory, dtype="bfloat16").run(jobs)
        assert result.prompt_logprobs is not None
        seen.append([each and each.logprob for each in result.prompt_logprobs])
    assert seen[0] == seen[1]
