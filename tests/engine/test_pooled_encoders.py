"""Encoders answer as transformers does with each prompt alone, whatever they are computed with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.pool_driver import PoolDriver, encoder_drivers
from tests.fakes.poolers import (
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
from tokenmesh.services.worker_svc.pooling.admission import admit_pool
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.ids import GatewayId, ModelName, RequestId
from tokenmesh.shared.messages.pooling import Pool, PoolingParams, PoolItem
from tokenmesh.shared.tokens import pack_ids

TOKENS = PoolingParams(task="token_embed", use_activation=False)
LENGTHS = (7, 1, 33, 7, 20, 33, 2, 40, 35, 18, 17, 5)
"""Some equal, some within a band of lengths, some alone."""
Made = tuple[PoolDriver, Any]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return encoder_drivers(tmp_path_factory.mktemp)


@some(ENCODERS, EVERY_LINE)
def test_tokens_are_those_of_each_prompt_alone(encoder: Callable[[str], Made], name: str) -> None:
    driver, model = encoder(name)
    given = prompts(*LENGTHS)
    ours = driver.run(given, TOKENS)
    for prompt, numbers in zip(given, ours, strict=True):
        expected = states_of(model, prompt).numpy()
        np.testing.assert_allclose(numbers, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_many_prompts_take_several_passes(
    name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows and without, by the C kernels and by torch."""
    model = make_pooler(ENCODERS[name], "Model")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path, native_kernels=native)
    monkeypatch.setattr(tree, "PASS_TOKENS", 50)
    monkeypatch.setattr(rows, "PASS_TOKENS", 50)
    given = prompts(*LENGTHS, 70)
    for prompt, numbers in zip(given, driver.run(given, TOKENS), strict=True):
        expected = states_of(model, prompt).numpy()
        np.testing.assert_allclose(numbers, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", [name for name, fake in ENCODERS.items() if fake.takes_types])
def test_pairs_have_types(encoder: Callable[[str], Made], name: str) -> None:
    driver, model = encoder(name)
    given = prompts(9, 9, 4)
    types = [bytes(5) + bytes([1]) * 4, b"", bytes([1]) * 4]
    ours = driver.run(given, TOKENS, types)
    for prompt, kinds, numbers in zip(given, types, ours, strict=True):
        expected = states_of(model, prompt, list(kinds)).numpy()
        np.testing.assert_allclose(numbers, expected, atol=2e-5, rtol=2e-5)
    assert not np.allclose(ours[0], driver.run(given[:1], TOKENS)[0], atol=1e-3)


def test_a_mean_is_normalized_as_the_modules_say(encoder: Callable[[str], Made]) -> None:
    driver, model = encoder("bert")
    given = prompts(*LENGTHS)
    for prompt, numbers in zip(given, driver.run(given), strict=True):
        mean = states_of(model, prompt).mean(dim=0)
        expected = torch.nn.functional.normalize(mean, dim=-1).numpy()
        np.testing.assert_allclose(numbers, expected, atol=1e-5)


def test_a_prompt_longer_than_a_step_is_computed_alone(encoder: Callable[[str], Made]) -> None:
    driver, model = encoder("bert")
    given = prompts(5, 100, 3)
    for prompt, numbers in zip(given, driver.run(given, TOKENS), strict=True):
        np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=2e-5)


def test_weights_without_the_pooler_are_enough(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForMaskedLM")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path)
    (prompt,) = prompts(12)
    np.testing.assert_allclose(
        driver.run([prompt], TOKENS)[0], states_of(model, prompt).numpy(), atol=2e-5
    )


def test_a_model_that_slept_answers_as_before(encoder: Callable[[str], Made]) -> None:
    driver, _ = encoder("roberta")
    given = prompts(5, 9)
    before = driver.run(given)
    for level, tags in ((1, ("kv_cache",)), (2, ("weights", "kv_cache"))):
        driver.loaded.resident.sleep(level)
        driver.loaded.resident.wake(tags)
        assert driver.loaded.resident.level == 0
        for old, new in zip(before, driver.run(given), strict=True):
            np.testing.assert_array_equal(old, new)


def test_numbers_that_are_not_finite_are_an_error(encoder: Callable[[str], Made]) -> None:
    driver, _ = encoder("bert")
    given = prompts(5, 9)
    tree: Any = driver.loaded.runner._model
    table = tree.tree.body.embeddings.word_embeddings.weight
    poisoned = given[0][2]
    given[1] = [token for token in given[1] if token != poisoned]
    kept = table.data[poisoned].clone()
    try:
        table.data[poisoned] = torch.nan
        requests = [driver.request(prompt) for prompt in given]
        first, second = driver.end(requests)
    finally:
        table.data[poisoned] = kept
    assert first.error is not None
    assert "not finite" in first.error.message
    assert second.reason == "stop"


def test_special_tokens_do_not_move_positions(encoder: Callable[[str], Made]) -> None:
    """A begin and an end of the text, as every tokenizer of these puts them."""
    for name in ("roberta", "modernbert", "jina_embeddings_v3"):
        driver, model = encoder(name)
        prompt = [0, *prompts(9)[0], 2]
        numbers = driver.run([prompt], TOKENS)[0]
        np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=2e-5)


@pytest.mark.parametrize("name", ["roberta", "xlm_roberta", "mpnet", "bert"])
def test_padding_that_a_text_spells_counts_as_in_transformers(
    encoder: Callable[[str], Made], name: str
) -> None:
    driver, model = encoder(name)
    given = prompts(9, 9, 6, 3)
    padding = model.config.pad_token_id
    given[0][0] = given[1][4] = given[1][5] = given[2][-1] = padding
    for prompt, numbers in zip(given, driver.run(given, TOKENS), strict=True):
        np.testing.assert_allclose(numbers, states_of(model, prompt).numpy(), atol=2e-5)


@pytest.mark.parametrize(("name", "take"), [("CLS", 0), ("LAST", -1), ("MEAN", slice(None))])
def test_an_operator_chooses_what_an_embedding_is_made_of(
    tmp_path: Path, name: str, take: int | slice
) -> None:
    model = make_pooler(ENCODERS["bert"], "Model")
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path, model={"pooling_type": name, "pooling_task": "embed"})
    assert driver.loaded.pooling.tasks == ("embed",)
    [prompt] = prompts(9)
    [ours] = driver.run([prompt], PoolingParams(task="embed", use_activation=False))
    states = states_of(model, prompt).numpy()[take]
    expected = states if states.ndim == 1 else states.mean(0)
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=2e-5)


def test_settings_of_pooling_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=3)
    model.save_pretrained(tmp_path)
    for field, value in (("pooling_type", "MEAN"), ("pooling_task", "embed")):
        with pytest.raises(ConfigError, match=f"{field} is .*does: classify"):
            PoolDriver(tmp_path, model={field: value})


async def test_the_default_of_use_activation_is_the_operators(tmp_path: Path) -> None:
    make_pooler(ENCODERS["bert"], "Model").save_pretrained(tmp_path)
    write_modules(tmp_path)
    driver = PoolDriver(tmp_path, model={"pooling_activation": False})
    for asked, given in ((None, False), (True, True), (False, False)):
        message = Pool(
            request_id=RequestId("r"),
            model=ModelName("m"),
            gateway=GatewayId("g"),
            stream=1,
            epoch=1,
            items=[PoolItem(prompt_ids=pack_ids(prompts(9)[0]))],
            params=PoolingParams(task="embed", use_activation=asked),
        )
        [request] = await admit_pool(message, driver.loaded, 16)
        assert request.spec.pooling is not None
        assert request.spec.pooling.use_activation is given
