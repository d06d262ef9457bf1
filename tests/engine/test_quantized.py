"""Quantized checkpoints against the same model with the numbers that their tensors stand for."""

import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.general_models import GENERAL, HEADS
from tests.fakes.models import Fake, make_fake
from tests.fakes.quantized import shard, write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import Tiny, prompt_of
from tests.rounds import some
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.quantization import read_quantization, write
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.kernels.linear.formats.round import Rounding, head_grid, rounded
from tokenmesh.shared.errors import ConfigError
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
DISTINCT: Final = frozenset(
    {
        *("fp8_block", "gptq4", "gptq_desc_act", "awq", "pack4_zeros", "int8", "nf4", "bnb8"),
        *("nvfp4", "mxfp4", "mxfp8"),
    }
)
"""One scheme of each layout of numbers and scales; the others differ in widths and in names."""
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
        torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=5e-5, rtol=0
    )
    oracle: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        logits = oracle(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize(("family", "scheme"), [("qwen2", "gptq4"), ("qwen3_moe", "pack4_zeros")])
def test_a_processor_without_our_instructions_computes_the_same_and_the_log_says_how(
    written: Written,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    scheme: str,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    # the package's name for the module is the function's
    start = import_module("tokenmesh.kernels.native.start")
    monkeypatch.setattr(start._process, "kernels", None)
    check(*written(family, scheme))
    assert "no C kernels, torch's slower ones are used: the processor has no AVX2" in caplog.text
    assert "are decoded to torch.float32, which saves no memory and is slow" in caplog.text


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        *((scheme, "qwen2") for scheme in SCHEMES),
        *(
            pytest.param(
                *(scheme, "qwen3_moe"), marks=() if scheme in DISTINCT else pytest.mark.slow
            )
            for scheme in SCHEMES
        ),
    ],
)
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


@some(SCHEMES, DISTINCT, name="scheme")
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


@pytest.mark.parametrize("scheme", ["pack4", "gptq_desc_act", "int8", "nvfp4", "fp8_block"])
def test_half_precision_is_within_the_rounding_of_activations(
    written: Written, scheme: str
) -> None:
    quantized, plain = written("qwen2", scheme)
    expected = outcome(plain, prompt_of(40))[1]
    job = Job(prompt_of(40), SCORED)
    (seen,) = EngineDriver(quantized, dtype="bfloat16").run([job])
    assert seen.prompt_logprobs is not None
    found = torch.tensor([each.logprob for each in seen.prompt_logprobs if each is not None])
    error = (found - torch.tensor(expected)).norm() / torch.tensor(expected).norm()
    assert error < 3e-2


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("rounding", ["int8", "int4", "fp8"])
def test_a_plain_checkpoint_is_rounded_when_it_is_loaded(
    written: Written, tmp_path: Path, family: str, rounding: Rounding
) -> None:
    _, plain = written(family, "int8")
    tensors = load_file(plain / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = rounded(weight, rounding).decoded()
        elif name in ("lm_head.weight", "model.embed_tokens.weight"):
            is_head = name == "lm_head.weight" or "lm_head.weight" not in tensors
            to = head_grid(rounding, torch.device("cpu"))
            tensors[name] = rounded(weight, to).decoded() if is_head else weight
    shutil.copytree(plain, tmp_path / "rounded")
    save_file(tensors, tmp_path / "rounded" / "model.safetensors", metadata={"format": "pt"})
    job = Job(prompt_of(40), SCORED)
    seen = []
    for directory, name in ((plain, rounding), (tmp_path / "rounded", None)):
        (result,) = EngineDriver(directory, quantization=name).run([job])
        assert result.prompt_logprobs is not None
        logprobs = [each.logprob for each in result.prompt_logprobs if each is not None]
        seen.append((result.token_ids, torch.tensor(logprobs)))
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[0][1], seen[1][1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_a_written_copy_computes_what_its_rounded_weights_do(
    written: Written, tmp_path: Path, family: str, to: Rounding
) -> None:
    _, source = written(family, "int8")
    assert write.main([str(source), str(tmp_path / "copy"), "--format", to]) == 0
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = rounded(weight, to).decoded()
    shutil.copytree(source, tmp_path / "plain")
    save_file(tensors, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path / "copy", tmp_path / "plain")


def test_a_large_file_becomes_several_with_the_same_tensors(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = written("qwen2", "int8")
    most = 40_000
    outs = tmp_path / "one", tmp_path / "several"
    for out in outs:
        assert write.main([str(source), str(out), "--format", "int8"]) == 0
        monkeypatch.setattr(write, "MOST_BYTES", most)
    whole = load_file(outs[0] / "model.safetensors")
    assert sum(each.nbytes for each in whole.values()) > 3 * most
    pieces: dict[str, torch.Tensor] = {}
    for path in outs[1].glob("*.safetensors"):
        found = load_file(path)
        assert not found.keys() & pieces.keys()
        assert sum(each.nbytes for each in [*found.values()][:-1]) < 2 * most
        pieces |= found
    assert pieces.keys() == whole.keys()
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)
    prompt = prompt_of(40)
    assert outcome(outs[1], prompt) == outcome(outs[0], prompt)


def test_a_copy_is_refused_with_a_reason(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized, plain = written("qwen2", "gptq4")
    for source, out, reason in (
        (quantized, tmp_path / "a", "is quantized already"),
        (plain, plain, "is there already"),
        (tmp_path / "none", tmp_path / "a", "there is no such directory"),
    ):
        assert write.main([str(source), str(out), "--format", "int8"]) == 1
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_the_setting_has_to_fit_the_checkpoint(written: Written) -> None:
    quantized, plain = written("qwen2", "gptq4")
    load(quantized, quantization="gptq_marlin")
    with pytest.raises(ConfigError, match=r"is 'int8', but .* is quantized as 'gptq'"):
        load(quantized, quantization="int8")
    with pytest.raises(ConfigError, match=r"is 'awq', but .* is not quantized; int8, int4, fp8"):
        load(plain, quantization="awq")
