"""Decoders that embed, classify and score on two ranks: the numbers of one."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.fakes.adapters import AdapterSpec, write_adapter
from tests.fakes.pool_driver import EMBED, PoolDriver
from tests.fakes.poolers import (
    DECODERS,
    ENCODERS,
    make_pooler,
    prompts,
    write_modules,
    write_reranker,
)
from tests.fakes.ranks import RanksPoolDriver
from tests.rounds import some
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.messages.pooling import PoolingParams

LENGTHS: Final = (7, 1, 33, 7, 20, 33, 2, 40)
SETTINGS: Final[dict[str, Any]] = {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 9}
TOKENS: Final = PoolingParams(task="token_embed", use_activation=False)
TOLERANCE: Final = 5e-5


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A checkpoint of a family by what it is for."""

    @cache
    def get(name: str, use: str) -> Path:
        directory, fake = tmp_path_factory.mktemp(f"{name}-{use}"), DECODERS[name]
        if use == "labels":
            make_pooler(fake, "ForSequenceClassification", num_labels=3).save_pretrained(directory)
            return directory
        suffix = "Model" if use == "body" else "ForCausalLM"
        make_pooler(fake, suffix).save_pretrained(directory)
        if use == "reranker":
            write_reranker(directory)
        else:
            write_modules(directory, "pooling_mode_lasttoken")
        return directory

    return get


def numbers(driver: PoolDriver, tasks: list[PoolingParams]) -> list[Any]:
    given = prompts(*LENGTHS)
    return [each for params in tasks for each in driver.run(given, params)]


CASES: Final = {
    **{f"{name}-embed": (name, "embed", [EMBED, TOKENS]) for name in DECODERS},
    "qwen3-body": ("qwen3", "body", [EMBED]),
    "qwen3-reranker": ("qwen3", "reranker", [PoolingParams(task="score")]),
    "llama-labels": (
        *("llama", "labels"),
        [PoolingParams(task="classify"), PoolingParams(task="token_classify")],
    ),
}


@some(CASES, {"qwen3-embed", "qwen3-reranker", "llama-labels"})
def test_two_ranks_answer_what_one_does(stored: Callable[[str, str], Path], name: str) -> None:
    family, use, tasks = CASES[name]
    directory = stored(family, use)
    two = RanksPoolDriver(directory, **SETTINGS)
    one = PoolDriver(directory, num_gpu_blocks_override=256, cpu_threads=1, **SETTINGS)
    assert two.loaded.pooling == one.loaded.pooling
    assert 2 * two.loaded.kv_bytes.block == one.loaded.kv_bytes.block
    for ours, expected in zip(numbers(two, tasks), numbers(one, tasks), strict=True):
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE)
    two.close()


def test_tasks_and_adapters_of_one_step_have_one_order_on_all_ranks(
    stored: Callable[[str, str], Path], tmp_path: Path
) -> None:
    directory = stored("qwen3", "embed")
    paths = [
        write_adapter(
            make_pooler(DECODERS["qwen3"], "ForCausalLM"),
            tmp_path / str(seed),
            AdapterSpec(seed=seed),
        )
        for seed in range(2)
    ]
    lora = {"enable_lora": True}
    two = RanksPoolDriver(directory, lora=lora)
    one = PoolDriver(directory, num_gpu_blocks_override=256, cpu_threads=1, lora=lora)
    given, found = prompts(*(9,) * 6), []
    for driver in (one, two):
        read = [None, *(driver.loaded.adapters.read(path) for path in paths)]
        # tasks of requests are objects of their own on a rank that follows
        tasks = [PoolingParams(task="embed", dimensions=8 if n % 2 else None) for n in range(6)]
        requests = [
            driver.request(prompt, params, adapter=read[n % 3])
            for n, (prompt, params) in enumerate(zip(given, tasks, strict=True))
        ]
        driver.end(requests)
        pooled = [request.output.pooled for request in requests]
        found.append([np.frombuffer(each.data, np.float32) for each in pooled if each])
    for ours, expected in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE)
    two.close()


def test_all_ranks_of_a_pooler_sleep_and_wake(stored: Callable[[str, str], Path]) -> None:
    two = RanksPoolDriver(stored("llama", "embed"), **SETTINGS)
    before = numbers(two, [EMBED])
    for level in (1, 2):
        two.loaded.resident.sleep(level)
        two.loaded.resident.wake(["weights", "kv_cache"])
        run = partial(numbers, two.again(), [EMBED])
        for ours, expected in zip(run(), before, strict=True):
            np.testing.assert_array_equal(ours, expected)
    two.close()


def test_an_encoder_is_refused_by_name(tmp_path: Path) -> None:
    name = next(iter(ENCODERS))
    make_pooler(ENCODERS[name], "Model").save_pretrained(tmp_path)
    write_modules(tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not work for an encoder"):
        RanksPoolDriver(tmp_path)
