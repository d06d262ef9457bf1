"""Adapters of models that pool: every prompt of a mixed batch equals its merged model."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import PREFIX, AdapterSpec, merge, write_adapter, write_tensors
from tests.fakes.pool_driver import PoolDriver, encoder_drivers
from tests.fakes.poolers import (
    DECODERS,
    ENCODERS,
    EVERY_LINE,
    make_pooler,
    prompts,
    states_of,
    write_modules,
)
from tests.ops.native import WAYS
from tests.rounds import some
from tokenmesh.engine.models.tree.pooling import rows, tree
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.pooling import PoolingParams

LORA = {"enable_lora": True}
LENGTHS = (7, 1, 33, 7, 20, 33, 2, 40, 35)
TOKENS = PoolingParams(task="token_embed", use_activation=False)
RAW = PoolingParams(task="classify", use_activation=False)
TOKEN_SCORES = PoolingParams(task="token_classify", use_activation=False)
Made = tuple[PoolDriver, Any]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return encoder_drivers(tmp_path_factory.mktemp, lora=LORA)


def linear_names(body: torch.nn.Module) -> dict[str, None]:
    """Last parts of the names of its linear layers."""
    found = (name for name, each in body.named_modules() if isinstance(each, torch.nn.Linear))
    return dict.fromkeys(name.rpartition(".")[2] for name in found)


def adapted(
    driver: PoolDriver, model: Any, root: Path, specs: Sequence[AdapterSpec]
) -> list[tuple[Any, Any]]:
    """Each adapter as the engine reads it, with its merged model; and none."""
    pairs: list[tuple[Any, Any]] = [(None, model)]
    for number, spec in enumerate(specs):
        path = write_adapter(model, root / str(number), spec)
        pairs.append((driver.loaded.adapters.read(path), merge(copy.deepcopy(model), path)))
    return pairs


def check(
    driver: PoolDriver,
    pairs: Sequence[tuple[Any, Any]],
    params: PoolingParams,
    expected: Callable[[Any, list[int]], torch.Tensor],
) -> None:
    """In one batch of all adapters and none, each prompt equals its own merged model."""
    given = prompts(*LENGTHS)
    chosen = [pairs[number % len(pairs)] for number in range(len(given))]
    ours = driver.run_adapted(given, [adapter for adapter, _ in chosen], params)
    for prompt, (adapter, model), numbers in zip(given, chosen, ours, strict=True):
        wanted = expected(model, prompt).detach().numpy()
        np.testing.assert_allclose(numbers, wanted, atol=2e-4, rtol=2e-4)
        if adapter is not None:
            plain = expected(pairs[0][1], prompt).detach().numpy()
            assert not np.allclose(wanted, plain, atol=1e-2), "the adapter changes nothing"


@some(ENCODERS, EVERY_LINE)
def test_tokens_of_encoders(encoder: Callable[[str], Made], tmp_path: Path, name: str) -> None:
    driver, model = encoder(name)
    modules = tuple(linear_names(model))
    specs = [AdapterSpec(modules=modules, seed=1), AdapterSpec(modules=modules[:2], seed=2, rank=9)]
    check(driver, adapted(driver, model, tmp_path, specs), TOKENS, states_of)


def test_a_projection_that_multiplies_more_than_tokens_is_refused(
    tmp_path: Path,
) -> None:
    """DeBERTa multiplies relative positions with them too."""
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}
    model = make_pooler(ENCODERS["deberta_v2"], "Model", **relative)
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path, max_num_batched_tokens=64, lora=LORA)
    specs = [AdapterSpec(modules=("value_proj", "dense"))]
    check(driver, adapted(driver, model, tmp_path, specs), TOKENS, states_of)
    path = write_adapter(model, tmp_path / "key", AdapterSpec(modules=("key_proj",)))
    with pytest.raises(InvalidInput, match=r"key_proj.* it is not computed once for each token"):
        driver.loaded.adapters.read(path)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize(
    ("name", "modules"), [("bert", ("query", "value")), ("modernbert", ("Wqkv", "Wo", "Wi"))]
)
def test_adapters_over_several_passes(
    name: str, modules: Sequence[str], native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the C kernels and by torch; adapters without the name that the body has in a model."""
    model = make_pooler(ENCODERS[name], "ForMaskedLM")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path, native_kernels=native, lora=LORA)
    monkeypatch.setattr(tree, "PASS_TOKENS", 50)
    monkeypatch.setattr(rows, "PASS_TOKENS", 50)
    pairs = adapted(driver, model, tmp_path / "whole", [AdapterSpec(modules=modules, seed=1)])
    body = model.base_model
    path = write_adapter(body, tmp_path / "body", AdapterSpec(modules=modules, seed=1))
    read = driver.loaded.adapters.read(path)
    pairs.append((read, merge(copy.deepcopy(body), path)))
    check(driver, pairs, TOKENS, states_of)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp("decoder")
    model = make_pooler(DECODERS["qwen3"], "ForCausalLM")
    model.save_pretrained(directory)
    write_modules(directory, "pooling_mode_lasttoken")
    driver = PoolDriver(
        directory,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=9,
        num_gpu_blocks_override=64,
        lora=LORA,
    )
    return driver, model


def last_state(model: Any, prompt: list[int]) -> torch.Tensor:
    return torch.nn.functional.normalize(states_of(model, prompt)[-1], dim=-1)


def test_decoders_in_chunks(decoder: Made, tmp_path: Path) -> None:
    driver, model = decoder
    modules = tuple(linear_names(model.base_model))
    specs = [AdapterSpec(modules=modules, seed=1), AdapterSpec(modules=("v_proj",), seed=2)]
    pairs = adapted(driver, model, tmp_path, specs)
    check(driver.again(), pairs, PoolingParams(task="embed"), last_state)


def test_another_content_never_finds_the_keys_of_the_first(decoder: Made, tmp_path: Path) -> None:
    driver, model = decoder
    specs = [AdapterSpec(seed=1), AdapterSpec(seed=2)]
    (_, first), (_, second) = adapted(driver, model, tmp_path, specs)[1:]
    reads = [driver.loaded.adapters.read(tmp_path / str(number)) for number in range(2)]
    fresh = driver.again()
    (prompt,) = prompts(40, seed=7)
    found = [fresh.run_adapted([prompt], [read])[0] for read in (*reads, reads[0], None)]
    models = (first, second, first, model)
    for numbers, each in zip(found, models, strict=True):
        np.testing.assert_allclose(numbers, last_state(each, prompt).numpy(), atol=2e-4)


def write_classifier(model: Any, directory: Path, modules: Sequence[str], seed: int) -> Path:
    """As PEFT saves an adapter of task SEQ_CLS: the classifier whole, next to the matrices.

    It takes every module whose name ends so, DistilBERT's `pre_classifier` too.
    """
    saved = [name for name, _ in model.named_children() if name.endswith(("classifier", "score"))]
    starts = tuple(f"{PREFIX}{name}." for name in saved)
    config = {
        "task_type": "SEQ_CLS",
        "target_modules": "all-linear",
        "modules_to_save": ["classifier", "score"],
    }
    path = write_adapter(model, directory, AdapterSpec(modules=modules, seed=seed, config=config))
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors = {name: each for name, each in tensors.items() if not name.startswith(starts)}
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if f"{PREFIX}{name}".startswith(starts):
            noise = torch.randn(parameter.shape, generator=generator)
            tensors[f"{PREFIX}{name}"] = parameter.detach() + 0.5 * noise
    save_file(tensors, file)
    return path


def merged_classifier(model: Any, path: Path) -> Any:
    found = merge(copy.deepcopy(model), path)
    whole = load_file(path / "adapter_model.safetensors")
    own = {name.removeprefix(PREFIX): each for name, each in whole.items() if ".lora_" not in name}
    problems = found.load_state_dict(own, strict=False)
    assert not problems.unexpected_keys
    return found


@torch.no_grad()
def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([prompt])).logits[0]  # type: ignore[no-any-return]


CLASSIFIERS: Mapping[str, tuple[Any, Sequence[str]]] = {
    "bert": (ENCODERS["bert"], ("query", "value", "dense")),
    "roberta": (ENCODERS["roberta"], ("query",)),
    "distilbert": (ENCODERS["distilbert"], ("q_lin",)),
    "modernbert": (ENCODERS["modernbert"], ("Wqkv", "dense")),
    "deberta_v2": (ENCODERS["deberta_v2"], ("value_proj", "dense")),
    "llama": (DECODERS["llama"], ("q_proj", "down_proj")),
    "qwen3": (DECODERS["qwen3"], ("o_proj",)),
}
"""Each with layers of its body, and of its head where it has more than the classifier."""


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_with_heads_of_adapters(name: str, tmp_path: Path) -> None:
    fake, modules = CLASSIFIERS[name]
    model = make_pooler(fake, "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path / "model")
    driver = PoolDriver(
        tmp_path / "model", max_num_batched_tokens=64, num_gpu_blocks_override=64, lora=LORA
    )
    pairs: list[tuple[Any, Any]] = [(None, model)]
    for seed in range(2):
        path = write_classifier(model, tmp_path / str(seed), modules, seed)
        pairs.append((driver.loaded.adapters.read(path), merged_classifier(model, path)))
    check(driver, pairs, RAW, logits_of)
    check(driver.again(max_num_batched_tokens=16), pairs, RAW, logits_of)


def test_a_model_that_slept_has_the_heads_of_adapters(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path / "model")
    driver = PoolDriver(tmp_path / "model", lora=LORA)
    path = write_classifier(model, tmp_path / "adapter", ("query", "dense"), 0)
    read = driver.loaded.adapters.read(path)
    given = prompts(5, 9)
    before = driver.run_adapted(given, [read, None], RAW)
    driver.loaded.resident.sleep(2)
    driver.loaded.resident.wake(("weights", "kv_cache"))
    for old, new in zip(before, driver.run_adapted(given, [read, None], RAW), strict=True):
        np.testing.assert_array_equal(old, new)


def test_token_classifiers_and_cross_encoders(tmp_path: Path) -> None:
    for suffix, params in (
        ("ForTokenClassification", TOKEN_SCORES),
        ("ForSequenceClassification", PoolingParams(task="score", use_activation=False)),
    ):
        model = make_pooler(ENCODERS["xlm_roberta"], suffix, num_labels=1)
        directory = tmp_path / suffix
        model.save_pretrained(directory)
        driver = PoolDriver(directory, max_num_batched_tokens=64, lora=LORA)
        path = write_classifier(model, directory / "adapter", ("key", "dense"), 3)
        pairs = [(None, model), (driver.loaded.adapters.read(path), merged_classifier(model, path))]
        check(driver, pairs, params, logits_of)


Spoil = Callable[[dict[str, torch.Tensor]], object]
WEIGHT = f"{PREFIX}classifier.weight"
BAD: Mapping[str, tuple[Spoil, str]] = {
    "missing": (lambda t: t.pop(WEIGHT), "holds no classifier.weight, which modules_to_save names"),
    "shape": (
        lambda t: t.update({WEIGHT: torch.zeros(2, 64)}),
        r"classifier.weight has shape \[2, 64\]; the model needs \[3, 64\]",
    ),
    "type": (lambda t: t.update({WEIGHT: t[WEIGHT].double()}), "classifier.weight has type F64"),
    "nan": (
        lambda t: t[WEIGHT].view(-1)[:1].fill_(torch.nan),
        "classifier.weight holds numbers that are not finite",
    ),
    "unknown": (
        lambda t: t.update({f"{PREFIX}pooler.dense.weight": torch.zeros(64, 64)}),
        "pooler.dense.weight is not served",
    ),
}  # fmt: skip


def test_heads_that_do_not_fit_are_refused(encoder: Callable[[str], Made], tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path / "model")
    driver = PoolDriver(tmp_path / "model", lora=LORA)
    path = write_classifier(model, tmp_path / "adapter", ("query",), 0)
    file = path / "adapter_model.safetensors"
    whole = load_file(file)
    for spoil, words in BAD.values():
        tensors = {name: each.clone() for name, each in whole.items()}
        spoil(tensors)
        save_file(tensors, file)
        with pytest.raises(InvalidInput, match=words):
            driver.loaded.adapters.read(path)
    save_file(whole, file)
    with pytest.raises(InvalidInput, match=r"whole modules .* only as the head of a classifier"):
        encoder("bert")[0].loaded.adapters.read(path)


def test_matrices_within_a_module_that_is_saved_whole_are_left_out(tmp_path: Path) -> None:
    """So does PEFT, by the parts of a path; a name that only ends so has both there."""
    model = make_pooler(ENCODERS["distilbert"], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path / "model")
    driver = PoolDriver(tmp_path / "model", lora=LORA)
    path = write_classifier(model, tmp_path / "adapter", ("q_lin",), 0)
    file = path / "adapter_model.safetensors"
    whole = load_file(file)
    read = driver.loaded.adapters.read(path)
    for name, height in (("classifier", 3), ("pre_classifier", 64)):
        a, b = torch.ones(4, 64), torch.ones(height, 4)
        matrices = {f"{PREFIX}{name}.lora_{side}.weight": x for side, x in (("A", a), ("B", b))}
        save_file(whole | matrices, file)
        if name == "classifier":
            assert driver.loaded.adapters.read(path).content_hash == read.content_hash
            continue
        with pytest.raises(InvalidInput, match="is saved whole and has matrices too"):
            driver.loaded.adapters.read(path)


def test_a_pooler_that_no_embedding_reads_changes_nothing(
    encoder: Callable[[str], Made], tmp_path: Path
) -> None:
    driver, model = encoder("roberta")
    path = write_adapter(model, tmp_path / "all", AdapterSpec(modules=("query", "dense")))
    read = driver.loaded.adapters.read(path)
    tensors = load_file(path / "adapter_model.safetensors")
    rest = {name: each for name, each in tensors.items() if ".pooler." not in name}
    assert len(rest) < len(tensors)
    without = write_tensors(tmp_path / "rest", rest, AdapterSpec())
    assert driver.loaded.adapters.read(without).content_hash == read.content_hash
