"""Adapters against models that they are merged into: every stream of a mixed batch, bad input."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.fakes.adapters import PREFIX, AdapterSpec, merge, write_adapter, write_tensors
from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.general_models import HEADS, make_general
from tests.fakes.models import Fake, make_fake, make_model
from tests.fakes.quantized import write_checkpoint
from tests.fakes.quantized_schemes import SCHEMES
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.shared.errors import InvalidInput

NUM_TOKENS = 12
LORA = {"enable_lora": True, "max_lora_rank": 16}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SPECS = {
    "llama": (
        AdapterSpec(seed=1),
        AdapterSpec(
            seed=2, rank=16, alpha=3, dtype=torch.bfloat16, modules=("q_proj", "down_proj")
        ),
        AdapterSpec(
            seed=3,
            ranks={"layers.1.self_attn.k_proj": 2, "up_proj": 7},
            alphas={"up_proj": 5},
            config={"use_rslora": True},
        ),
    ),
    "phi3": (AdapterSpec(seed=1, modules=FUSED), AdapterSpec(seed=2, rank=1, modules=FUSED)),
    "qwen3": (AdapterSpec(seed=1), AdapterSpec(seed=2, rank=9)),
}

Adapted = tuple[ReadAdapter, TinyCheckpoint]


@pytest.fixture(scope="module")
def drivers(tiny: Tiny) -> Callable[..., EngineDriver]:
    @cache
    def get(name: str, kind: str = "native") -> EngineDriver:
        kinds: dict[str, Any] = {
            "native": {},
            "torch": {"native_kernels": False},
            "general": {"model_impl": "transformers"},
        }
        return EngineDriver(tiny(name).directory, lora=LORA, **kinds[kind])

    return get


@pytest.fixture(scope="module")
def adapted(
    tiny: Tiny, drivers: Callable[..., EngineDriver], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[Adapted]]:
    """The adapters of SPECS as an engine reads them, each with its merged model."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def merged_of(name: str, number: int) -> tuple[Path, TinyCheckpoint]:
        path = write_adapter(make_model(name), root / f"{name}-{number}", SPECS[name][number])
        return path, TinyCheckpoint(tiny(name).directory, lambda: merge(make_model(name), path))

    def get(name: str, kind: str = "native") -> list[Adapted]:
        read = drivers(name, kind).model.adapters.read
        pairs = [merged_of(name, number) for number in range(len(SPECS[name]))]
        return [(read(path), merged) for path, merged in pairs]

    return get


def jobs_of(
    checkpoint: TinyCheckpoint, adapted: list[Adapted]
) -> tuple[list[Job], list[list[int]]]:
    """Streams of all adapters and of none, two of each, with the same prompts; their outputs."""
    jobs, expected = [], []
    for prompt in (prompt_of(14, seed=1), prompt_of(30, seed=2)):
        jobs.append(Job(prompt, greedy(NUM_TOKENS)))
        expected += checkpoint.greedy([prompt], NUM_TOKENS)
        for read, merged in adapted:
            jobs.append(Job(prompt, greedy(NUM_TOKENS), adapter=read))
            expected += merged.greedy([prompt], NUM_TOKENS)
    assert len({tuple(each) for each in expected}) == len(expected), "an adapter changes nothing"
    return jobs, expected


@pytest.mark.parametrize("kind", ["native", "torch", "general"])
@pytest.mark.parametrize("name", SPECS)
def test_every_stream_of_a_mixed_batch_equals_its_merged_model(
    tiny: Tiny,
    drivers: Callable[..., EngineDriver],
    adapted: Callable[..., list[Adapted]],
    name: str,
    kind: str,
) -> None:
    jobs, expected = jobs_of(tiny(name), adapted(name, kind))
    assert drivers(name, kind).tokens(jobs) == expected


@pytest.mark.slow
def test_32_streams_with_32_adapters_equal_their_merged_models(tiny: Tiny, tmp_path: Path) -> None:
    driver = EngineDriver(tiny("llama").directory, lora=LORA, max_num_seqs=32)
    jobs, expected = [], []
    for seed in range(32):
        spec = AdapterSpec(seed=seed, rank=1 + seed % 16, alpha=4 + seed % 3)
        path = write_adapter(make_model("llama"), tmp_path / str(seed), spec)
        merged = TinyCheckpoint(path, lambda path=path: merge(make_model("llama"), path))  # type: ignore[misc]
        prompt = prompt_of(20, seed=seed % 4)
        jobs.append(Job(prompt, greedy(NUM_TOKENS), adapter=driver.model.adapters.read(path)))
        expected += merged.greedy([prompt], NUM_TOKENS)
    assert len({tuple(each) for each in expected}) > 16, "the adapters change nothing"
    assert driver.tokens(jobs) == expected


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_and_preemptions_change_nothing(
    tiny: Tiny,
    drivers: Callable[..., EngineDriver],
    adapted: Callable[..., list[Adapted]],
    chunk: int,
) -> None:
    jobs, expected = jobs_of(tiny("llama"), adapted("llama"))
    driver = drivers("llama").again(max_num_batched_tokens=chunk, num_blocks=8)
    outcomes = driver.run(jobs)
    assert [each.token_ids for each in outcomes] == expected
    # a step of one token has one row
    assert chunk == 1 or any(each.num_preemptions for each in outcomes)


def test_a_stream_goes_on_where_an_earlier_attempt_was(
    tiny: Tiny, drivers: Callable[..., EngineDriver], adapted: Callable[..., list[Adapted]]
) -> None:
    read, merged = adapted("llama")[0]
    prompt = prompt_of(19, seed=1)
    (expected,) = merged.greedy([prompt], NUM_TOKENS)
    job = Job(prompt, greedy(NUM_TOKENS), output=expected[:5], adapter=read)
    assert drivers("llama").again().tokens([job]) == [expected]


def test_another_content_under_one_name_never_finds_the_keys_of_the_first(
    drivers: Callable[..., EngineDriver], adapted: Callable[..., list[Adapted]]
) -> None:
    prompt = prompt_of(48, seed=4)
    driver = drivers("llama").again()
    (first, _), (second, merged), _ = adapted("llama")
    alone = Job(prompt, greedy(NUM_TOKENS), adapter=first)
    assert [each.num_cached for each in driver.run([alone])] == [0]
    assert [each.num_cached for each in driver.run([alone])] == [32]
    (outcome,) = driver.run([Job(prompt, greedy(NUM_TOKENS), adapter=second)])
    assert outcome.num_cached == 0
    assert [outcome.token_ids] == merged.greedy([prompt], NUM_TOKENS)
    assert [each.num_cached for each in driver.run([Job(prompt, greedy(NUM_TOKENS))])] == [0]


def test_logprobs_are_those_of_the_merged_model(
    drivers: Callable[..., EngineDriver], adapted: Callable[..., list[Adapted]]
) -> None:
    prompt = prompt_of(30, seed=5)
    for read, merged in adapted("llama"):
        expected = torch.log_softmax(merged.logits(prompt)[-1], dim=-1)
        sampling = greedy(1)
        sampling = type(sampling)(**{**_fields(sampling), "logprobs": 5})
        (outcome,) = drivers("llama").again().run([Job(prompt, sampling, adapter=read)])
        (found,) = outcome.logprobs
        assert found.logprob == pytest.approx(float(expected.max()), abs=2e-4)


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


Spoil = Callable[[Path], object]


def config(**changes: Any) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def spoil(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file)

    return spoil


def pickle(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()
    torch.save({}, directory / "adapter_model.bin")


def cut(directory: Path) -> None:
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


Q = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
EMBEDDING = f"{PREFIX}model.embed_tokens.lora_embedding_A"
UNKNOWN = f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight"
MAGNITUDE = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector"


def pipe(directory: Path) -> None:
    (directory / "adapter_config.json").unlink()
    os.mkfifo(directory / "adapter_config.json")


def header(directory: Path, **entry: Any) -> None:
    """Another header before the same bytes."""
    file = directory / "adapter_model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    found = {**json.loads(data[8:end]), **entry}
    made = json.dumps(found).encode()
    file.write_bytes(len(made).to_bytes(8, "little") + made + data[end:])


def deep(directory: Path) -> None:
    text = f'{{"peft_type": "LORA", "r": 1, "x": {"[" * 900}{"]" * 900}}}'
    (directory / "adapter_config.json").write_text(text)


BAD: dict[str, tuple[Spoil, str]] = {
    "pickled": (pickle, r"adapter_model.bin: is pickled"),
    "truncated": (cut, r"adapter_model.safetensors: cannot be read as safetensors"),
    "no config": (
        lambda d: (d / "adapter_config.json").unlink(),
        r"adapter_config.json: cannot be read",
    ),
    "no json": (
        lambda d: (d / "adapter_config.json").write_text("{"),
        r"adapter_config.json: is not valid JSON",
    ),
    "rank": (config(r=17), r"r is 17 for model.layers.0.*max_lora_rank allows 16"),
    "other rank": (config(r=5), r"lora_A.weight has shape \[4, 80\]; the model needs \[5, 80\]"),
    "no rank": (config(r=0), r"r is 0, not a positive integer"),
    "alpha": (config(lora_alpha="x"), r"lora_alpha is 'x', not a finite number"),
    "kind": (config(peft_type="LOHA"), r"peft_type is 'LOHA'; only LORA is served"),
    "dora": (config(use_dora=True), r"use_dora is True: DoRA is not served"),
    "bias": (config(bias="all"), r"bias is 'all': biases are not served"),
    "saved": (config(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
    "pissa": (config(init_lora_weights="pissa"), r"init_lora_weights is 'pissa'"),
    "later": (config(use_qalora=True), r"use_qalora is True: it is not served"),
    "no expression": (
        config(rank_pattern={"a)|(b": 2}),
        r"rank_pattern has the key 'a\)\|\(b', which is not a regular expression",
    ),
    "reference": (config(rank_pattern={"(a)\\1": 2}), "rank_pattern has .* groupref, which is not"),
    "escape": (config(rank_pattern={"a\\": 2}), r"rank_pattern has the key"),
    "long expression": (config(target_modules=".*" * 3000), "has more than 4096 characters"),
    "no targets": (config(target_modules=["x_proj"]), "target_modules chooses none of"),
    "targets": (config(target_modules=7), "target_modules is neither a list of names nor"),
    "excluded": (config(exclude_modules=[1]), "exclude_modules is neither a list of names nor"),
    "layers": (config(layers_to_transform=["1"]), "layers_to_transform is not a list of numbers"),
    "greedy layer names": (
        config(layers_pattern=["lay.*"], layers_to_transform=[1]),
        "layers_pattern is not a list of names without alternatives and repetitions",
    ),
    "layer names": (config(layers_pattern=["a|b"]), "layers_pattern is not a list of names"),
    "patterns": (
        config(alpha_pattern={f"m{n}": 2 for n in range(5000)}),
        r"alpha_pattern has 5000 keys; at most 4096",
    ),
    "large rank": (config(r=10**300), r"r is 1000.*\.\.\., not a positive integer"),
    "rslora": (config(use_rslora="false"), r"use_rslora is 'false', neither true nor false"),
    "infinite": (config(lora_alpha=float("inf")), r"lora_alpha is inf, not a finite number"),
    "large config": (config(x="y" * (1 << 20)), r"adapter_config.json: is larger than 1048576"),
    "deep": (deep, r"x is .*: it is not served|is not valid JSON"),
    "pipe": (pipe, r"adapter_config.json: is not a file"),
    "directory": (
        lambda d: shutil.move(d / "adapter_model.safetensors", d / "x"),
        r"holds no adapter_model.safetensors",
    ),
    "dimensions": (
        lambda d: header(d, x={"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}),
        r"cannot be read as safetensors",
    ),
    "large header": (
        lambda d: header(d, __metadata__={"x": "y" * (9 << 20)}),
        r"its header of 94\d+ bytes does not fit",
    ),
    "long name": (
        tensors(lambda t: t.update({"x\n" * 5000: t[Q].clone()})),
        r"'x\\n.{400,1200} is not served: it is not a matrix",
    ),
    "both names": (
        tensors(lambda t: t.update({f"{Q}x": t[Q].clone()})),
        r"lora_A.weightx is not served",
    ),
    "target": (
        tensors(lambda t: t.update({UNKNOWN: t[Q].clone()})),
        r"layers.9.*has no linear layer model.layers.9.self_attn.q_proj.*trained on tiny",
    ),
    "embedding": (
        tensors(lambda t: t.update({EMBEDDING: t[Q].clone()})),
        r"lora_embedding_A is not served: adapters of embeddings",
    ),
    "magnitude": (
        tensors(lambda t: t.update({MAGNITUDE: t[Q][0].clone()})),
        r"lora_magnitude_vector is not served: DoRA",
    ),
    "half": (tensors(lambda t: t.pop(Q)), r"q_proj.lora_B.weight has no lora_A next to it"),
    "base": (
        tensors(lambda t: t.update({Q: torch.zeros(4, 96)})),
        r"q_proj.lora_A.weight has shape \[4, 96\]; the model needs \[4, 64\]",
    ),
    "type": (
        tensors(lambda t: t.update({Q: t[Q].double()})),
        r"q_proj.lora_A.weight has type F64; supported are F32, F16, BF16, F8_E4M3, F8_E5M2",
    ),
    "integers": (
        tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})),
        r"q_proj.lora_A.weight has type I8; supported are F32",
    ),
    "scales": (
        tensors(lambda t: t.update({f"{Q}_scale": torch.ones(1)})),
        r"lora_A.weight_scale is not served",
    ),
    "nan of 8 bits": (
        tensors(lambda t: t.update({Q: (t[Q] * math.nan).to(torch.float8_e4m3fn)})),
        r"q_proj.lora_A.weight holds numbers that are not finite",
    ),
    "nan": (
        tensors(lambda t: t[Q].view(-1)[:1].fill_(float("nan"))),
        r"q_proj.lora_A.weight holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_matrices_of_eight_bits_are_the_numbers_that_they_stand_for(
    drivers: Callable[..., EngineDriver], tmp_path: Path, kind: torch.dtype
) -> None:
    """As PEFT copies them into its parameters."""
    adapters = drivers("llama").model.adapters
    stored = write_adapter(make_model("llama"), tmp_path / "stored")
    tensors(lambda t: t.update({name: each.to(kind) for name, each in t.items()}))(stored)
    plain = write_adapter(make_model("llama"), tmp_path / "plain")
    tensors(lambda t: t.update({name: each.to(kind).float() for name, each in t.items()}))(plain)
    jobs = [Job(prompt_of(9), greedy(4), adapter=adapters.read(each)) for each in (stored, plain)]
    assert len({str(each) for each in drivers("llama").tokens(jobs)}) == 1


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_refused_by_name(
    drivers: Callable[..., EngineDriver], tmp_path: Path, name: str
) -> None:
    spoil, words = BAD[name]
    directory = write_adapter(make_model("llama"), tmp_path / "bad")
    spoil(directory)
    with pytest.raises(InvalidInput, match=words):
        drivers("llama").model.adapters.read(directory)


def test_the_hash_is_of_the_content(drivers: Callable[..., EngineDriver], tmp_path: Path) -> None:
    read = drivers("llama").model.adapters.read
    model = make_model("llama")
    one = write_adapter(model, tmp_path / "one")
    first = read(one).content_hash
    assert read(write_adapter(model, tmp_path / "two")).content_hash == first
    config(lora_alpha=9)(one)
    assert read(one).content_hash != first
    other = write_adapter(model, tmp_path / "three", AdapterSpec(seed=9))
    assert read(other).content_hash != first


def test_an_adapter_without_tensors_is_refused(
    drivers: Callable[..., EngineDriver], tmp_path: Path
) -> None:
    write_tensors(tmp_path, {}, AdapterSpec())
    with pytest.raises(InvalidInput, match="holds no tensor"):
        drivers("llama").model.adapters.read(tmp_path)


TREES: dict[str, tuple[AdapterSpec, str]] = {
    "deepseek_v3": (
        AdapterSpec(modules=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj")),
        "kv_b_proj",
    ),
    "falcon_h1": (AdapterSpec(modules=("q_proj", "o_proj", "down_proj"), size=2.0), "in_proj"),
    "gpt_oss": (AdapterSpec(modules=("q_proj", "v_proj", "o_proj")), "lm_head"),
    "qwen3_moe": (AdapterSpec(modules=("q_proj",), experts=True), "embed_tokens"),
    "glm4_moe": (AdapterSpec(modules=("o_proj", "down_proj"), experts=True), "lm_head"),
}
"""Module trees and models with experts; and a layer that cannot have an adapter."""


@pytest.mark.parametrize("name", TREES)
def test_module_trees_and_experts_equal_their_merged_models(
    tiny: Tiny, tmp_path: Path, name: str
) -> None:
    spec, refused = TREES[name]
    driver = EngineDriver(tiny(name).directory, lora=LORA, max_num_batched_tokens=16)
    jobs, expected = [], []
    for seed in range(2):
        path = write_adapter(make_general(name), tmp_path / str(seed), replace(spec, seed=seed))
        merged = TinyCheckpoint(path, partial(merged_with, name, path))
        prompt = prompt_of(14 + seed, seed=seed)
        jobs.append(Job(prompt, greedy(8), adapter=driver.model.adapters.read(path)))
        expected += merged.greedy([prompt], 8)
        jobs.append(Job(prompt, greedy(8)))
        expected += tiny(name).greedy([prompt], 8)
    assert expected[0] != expected[1], "the adapter changes nothing"
    assert driver.tokens(jobs) == expected
    module = next(n for n, _ in make_general(name).named_modules() if n.endswith(refused))
    tensors = {f"{PREFIX}{module}.lora_{each}.weight": torch.zeros(4, 4) for each in "AB"}
    write_tensors(tmp_path / "refused", tensors, spec)
    with pytest.raises(InvalidInput, match=f"{refused}.lora_A.weight cannot be applied"):
        driver.model.adapters.read(tmp_path / "refused")


def merged_with(name: str, path: Path) -> Any:
    return merge(make_general(name), path)


def test_experts_that_do_not_fit_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    driver = EngineDriver(tiny("qwen3_moe").directory, lora=LORA)
    spec = AdapterSpec(modules=("q_proj",), experts=True)
    path = write_adapter(make_general("qwen3_moe"), tmp_path / "a", spec)
    key = f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight"
    tensors(lambda t: t.update({key: torch.zeros(3, 3)}))(path)
    with pytest.raises(InvalidInput, match="and lora_B have shapes"):
        driver.model.adapters.read(path)
    write_adapter(make_general("qwen3_moe"), path, spec)
    config(rank_pattern={"experts.down_proj": 2})(path)
    with pytest.raises(InvalidInput, match=r"the experts need .* or \[\[16, 24\], \[64, 16\]\]"):
        driver.model.adapters.read(path)
    config(rank_pattern={"experts.down_proj": 17, r".*\.gate_up_proj": 17}, r=17)(path)
    with pytest.raises(InvalidInput, match=r"r is 17 .*max_lora_rank allows 16|have shapes"):
        driver.model.adapters.read(path)


@pytest.mark.parametrize("scheme", ["gptq4", "fp8_block"])
def test_an_adapter_is_added_to_what_quantized_tensors_stand_for(
    tmp_path: Path, scheme: str
) -> None:
    source, quantized, plain = (tmp_path / name for name in ("source", "quantized", "plain"))
    sizes = {"intermediate_size": 96, "num_hidden_layers": 2}
    make_fake(Fake("Qwen2", sizes), HEADS).save_pretrained(source)
    write_checkpoint(source, quantized, plain, SCHEMES[scheme])
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    adapter = write_adapter(model, tmp_path / "adapter")
    driver = EngineDriver(quantized, lora=LORA)
    prompt = prompt_of(20)
    job = Job(prompt, greedy(8), adapter=driver.model.adapters.read(adapter))
    merged = TinyCheckpoint(plain, lambda: merge(model, adapter))
    assert driver.tokens([job]) == merged.greedy([prompt], 8)
