"""Decoders that embed and classify: chunked, cached and batched like prompts that generate."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.fakes.pool_driver import PoolDriver, numbers_of
from tests.fakes.poolers import (
    DECODERS,
    HIDDEN,
    FakePooler,
    make_pooler,
    prompts,
    states_of,
    write_json,
    write_modules,
    write_reranker,
)
from tokenmesh.services.worker_svc.pooling.admission import admit_pool
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.pooling import Pool, PoolingParams, PoolItem
from tokenmesh.shared.tokens import pack_ids

LENGTHS = (7, 1, 33, 7, 20, 33, 2, 40)
TOKENS = PoolingParams(task="token_embed", use_activation=False)
CLASSIFY = PoolingParams(task="classify")
Made = tuple[PoolDriver, Any]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A checkpoint that generates, served for embeddings of its last token."""

    @cache
    def get(name: str) -> Made:
        directory = tmp_path_factory.mktemp(name)
        model = make_pooler(DECODERS[name], "ForCausalLM")
        model.save_pretrained(directory)
        write_modules(directory, "pooling_mode_lasttoken")
        driver = PoolDriver(
            *(directory,),
            max_num_batched_tokens=24,
            long_prefill_token_threshold=9,
            num_gpu_blocks_override=64,
        )
        return driver, model

    return get


def unit(vector: torch.Tensor) -> Any:
    return torch.nn.functional.normalize(vector, dim=-1).numpy()


@pytest.mark.parametrize("name", DECODERS)
def test_the_last_token_in_chunks(decoder: Callable[[str], Made], name: str) -> None:
    driver, model = decoder(name)
    given = prompts(*LENGTHS)
    for prompt, numbers in zip(given, driver.run(given), strict=True):
        np.testing.assert_allclose(numbers, unit(states_of(model, prompt)[-1]), atol=2e-5)


def test_all_tokens_in_chunks(decoder: Callable[[str], Made]) -> None:
    driver, model = decoder("qwen3")
    given = prompts(*LENGTHS, seed=1)
    fresh = driver.again(enable_prefix_caching=False)
    for prompt, numbers in zip(given, fresh.run(given, TOKENS), strict=True):
        np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=5e-5)


def test_an_equal_beginning_is_computed_once(decoder: Callable[[str], Made]) -> None:
    driver, model = decoder("qwen3")
    fresh = driver.again()
    (shared,) = prompts(32, seed=2)
    given = [[*shared, *rest] for rest in prompts(3, 9, 1, seed=3)]
    requests = [fresh.request(prompt) for prompt in given]
    fresh.end(requests[:1])
    fresh.end(requests[1:])
    assert [each.place.num_cached for each in requests] == [0, 32, 32]
    for prompt, request in zip(given, requests, strict=True):
        assert request.output.pooled is not None
        numbers = np.frombuffer(request.output.pooled.data, np.float32)
        np.testing.assert_allclose(numbers, unit(states_of(model, prompt)[-1]), atol=2e-5)


def test_what_needs_all_tokens_finds_nothing_cached(decoder: Callable[[str], Made]) -> None:
    driver, model = decoder("qwen3")
    fresh = driver.again()
    (prompt,) = prompts(40, seed=4)
    fresh.run([prompt])
    (numbers,) = fresh.run([prompt], TOKENS)
    np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=5e-5)


def test_preempted_prompts_are_computed_again(decoder: Callable[[str], Made]) -> None:
    driver, model = decoder("llama")
    fresh = driver.again(enable_prefix_caching=False)
    given = prompts(40, 40, 40, seed=5)
    requests = [fresh.request(prompt, TOKENS) for prompt in given]
    for request in requests:
        fresh.engine.add(request)
    fresh.engine.step()
    fresh.engine._scheduler.preempt(requests[0])
    while fresh.engine.has_work:
        fresh.engine.step()
    for prompt, request in zip(given, requests, strict=True):
        assert request.output.pooled is not None
        numbers = np.frombuffer(request.output.pooled.data, np.float32).reshape(-1, HIDDEN)
        np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=5e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_decoders_classify_by_their_last_token(name: str, tmp_path: Path) -> None:
    model = make_pooler(DECODERS[name], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path)
    driver = PoolDriver(tmp_path, max_num_batched_tokens=24, num_gpu_blocks_override=64)
    given = prompts(*LENGTHS)
    for prompt, scores in zip(given, driver.run(given, CLASSIFY), strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0].softmax(-1)
        np.testing.assert_allclose(scores, expected.numpy(), atol=3e-5)
    each = PoolingParams(task="token_classify")
    for prompt, scores in zip(given, driver.run(given, each), strict=True):
        with torch.no_grad():
            expected = model.score(states_of(model, prompt)).softmax(-1)
        np.testing.assert_allclose(scores, expected.numpy(), atol=3e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_reranker_scores_by_two_logits(tmp_path: Path, is_tied: bool) -> None:
    model = make_pooler(DECODERS["qwen3"], "ForCausalLM", tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    write_reranker(tmp_path)
    driver = PoolDriver(tmp_path, num_gpu_blocks_override=64)
    assert driver.loaded.pooling.tasks == ("classify", "score", "token_classify")
    given = prompts(*LENGTHS)
    for prompt, score in zip(given, driver.run(given, PoolingParams(task="score")), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        expected = torch.sigmoid(logits[9] - logits[7]).numpy()
        np.testing.assert_allclose(score, [expected], atol=3e-5)
    each = PoolingParams(task="token_classify")
    for prompt, scores in zip(given, driver.run(given, each), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0]
        expected = torch.sigmoid(logits[:, 9:10] - logits[:, 7:8]).numpy()
        np.testing.assert_allclose(scores, expected, atol=3e-5)


async def test_a_classifier_reads_the_last_token_that_is_not_padding(tmp_path: Path) -> None:
    """Many texts end with a token that pads, too."""
    model = make_pooler(DECODERS["qwen2"], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path)
    driver = PoolDriver(tmp_path, num_gpu_blocks_override=64)
    padding = model.config.pad_token_id
    given = [[7, 8, padding], [padding, 9, padding, padding], [7, padding, 8], [padding] * 3]
    message = Pool(
        request_id=RequestId("r"),
        model=ModelName("m"),
        gateway=GatewayId("g"),
        stream=1,
        epoch=1,
        items=[PoolItem(prompt_ids=pack_ids(each)) for each in given],
        params=CLASSIFY,
    )
    requests = await admit_pool(message, driver.loaded, 16)
    assert [each.reason for each in driver.end(requests)] == ["stop"] * len(given)
    for prompt, request in zip(given, requests, strict=True):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0].softmax(-1)
        np.testing.assert_allclose(numbers_of(request), expected.numpy(), atol=3e-5)
    each_params = PoolingParams(task="token_classify")
    message = msgspec.structs.replace(message, params=each_params)
    requests = await admit_pool(message, driver.loaded, 16)
    assert [each.num_known for each in requests] == [3, 4, 3, 3]


@pytest.mark.parametrize(
    ("kind", "values"), [("Phi", {}), ("Helium", {}), ("NanoChat", {}), ("Cohere", {})]
)
def test_a_score_by_logits_that_are_more_than_products_is_refused(
    tmp_path: Path, kind: str, values: dict[str, Any]
) -> None:
    """A bias (Phi), a cap (NanoChat), a multiplier (Cohere)."""
    fake = FakePooler(kind, {"num_key_value_heads": 2, "head_dim": 16, **values})
    make_pooler(fake, "ForCausalLM").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {**config, "classifier_from_token": ["no", "yes"]})
    write_json(tmp_path / "tokenizer.json", {"model": {"vocab": {"no": 7, "yes": 9}}})
    settings: dict[str, Any] = {"model": {"runner": "pooling"}, "num_gpu_blocks_override": 64}
    if kind == "Helium":  # none of them
        assert PoolDriver(tmp_path, **settings).loaded.pooling.tasks == (
            "classify",
            "score",
            "token_classify",
        )
        return
    with pytest.raises(CheckpointError, match="LogitScore of a model whose logits"):
        PoolDriver(tmp_path, **settings)


def test_weights_may_be_those_of_the_body_alone(tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: the architecture of a decoder, no head, no prefix."""
    model = make_pooler(DECODERS["qwen3"], "Model")
    model.save_pretrained(tmp_path)
    config = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    write_json(tmp_path / "config.json", config)
    write_modules(tmp_path, "pooling_mode_lasttoken")
    driver = PoolDriver(tmp_path, num_gpu_blocks_override=64)
    (prompt,) = prompts(20)
    numbers = driver.run([prompt])[0]
    np.testing.assert_allclose(numbers, unit(states_of(model, prompt)[-1]), atol=2e-5)


def test_a_decoder_is_embedded_where_the_settings_say_so(tmp_path: Path) -> None:
    model = make_pooler(DECODERS["llama"], "ForCausalLM")
    model.save_pretrained(tmp_path)
    driver = PoolDriver(tmp_path, model={"runner": "pooling"}, num_gpu_blocks_override=64)
    (prompt,) = prompts(20)
    numbers = driver.run([prompt])[0]
    np.testing.assert_allclose(numbers, unit(states_of(model, prompt)[-1]), atol=2e-5)


def test_a_decoder_may_see_its_whole_prompt(tmp_path: Path) -> None:
    """As embedding gemma does, with windows on both sides."""
    fake = DECODERS["gemma3_text"]
    model = make_pooler(fake, "TextModel", use_bidirectional_attention=True)
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path)
    assert not driver.loaded.pooling.is_causal
    given = prompts(*LENGTHS)
    for prompt, numbers in zip(given, driver.run(given), strict=True):
        mean = states_of(model, prompt).mean(dim=0)
        np.testing.assert_allclose(numbers, unit(mean), atol=2e-5)


def test_a_reranker_may_be_described_with_keys_of_vllm(tmp_path: Path) -> None:
    model = make_pooler(DECODERS["qwen3"], "ForCausalLM")
    model.save_pretrained(tmp_path)
    config = {
        **model.config.to_dict(),
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / "tokenizer.json", {"model": {"vocab": {"no": 7, "yes": 9}}})
    driver = PoolDriver(tmp_path, num_gpu_blocks_override=64)
    (prompt,) = prompts(20)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits[[7, 9]], dim=-1)[1].numpy()
    (score,) = driver.run([prompt], PoolingParams(task="score"))
    np.testing.assert_allclose(score, [expected], atol=3e-5)


def test_a_body_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    model = make_pooler(DECODERS["mistral"], "ForCausalLM")
    model.save_pretrained(tmp_path)
    code = {"auto_map": {"AutoModel": "modeling_grit.MistralModel"}}
    write_json(tmp_path / "config.json", {**model.config.to_dict(), **code})
    write_modules(tmp_path)
    with pytest.raises(CheckpointError, match="modeling_grit"):
        PoolDriver(tmp_path)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_config_may_let_tokens_see_each_other(name: str, tmp_path: Path) -> None:
    model = make_pooler(DECODERS[name], "Model", is_causal=False)
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path)
    assert not driver.loaded.pooling.is_causal
    given = prompts(*LENGTHS)
    for prompt, numbers in zip(given, driver.run(given), strict=True):
        np.testing.assert_allclose(numbers, unit(states_of(model, prompt).mean(dim=0)), atol=2e-5)
