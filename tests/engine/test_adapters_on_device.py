"""Adapters on the runner for GPUs, with a fake one: slots, graphs, streams next to each other."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.fakes.adapters import AdapterSpec, merge, write_adapter
from tests.fakes.cuda_driver import CudaDriver
from tests.fakes.engine_driver import Job, greedy
from tests.fakes.models import make_model
from tests.fakes.reference_layers import reference_layers
from tests.fakes.tiny import Tiny, TinyCheckpoint, prompt_of
from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.engine.adapters.read import AdapterReader

NUM_TOKENS = 8
Adapted = tuple[ReadAdapter, TinyCheckpoint]
PROMPTS = (prompt_of(14, seed=1), prompt_of(30, seed=2))


@pytest.fixture(autouse=True)
def on_references() -> Iterator[None]:
    with torch.inference_mode(), reference_layers():
        yield


def driver_of(tiny: Tiny, max_loras: int) -> CudaDriver:
    lora = {"enable_lora": True, "max_loras": max_loras}
    return CudaDriver(tiny("llama").directory, max_num_seqs=9, lora=lora)


def merged_with(path: Path) -> object:
    with torch.inference_mode(False):
        return merge(make_model("llama"), path)


def adapters(
    driver: CudaDriver, folder: Path, count: int
) -> list[tuple[ReadAdapter, TinyCheckpoint]]:
    model = driver.runner._forward.model
    reader, made = AdapterReader(model.sites, model.dtype, 16), []
    for seed in range(count):
        path = folder / str(seed)
        with torch.inference_mode(False):
            write_adapter(make_model("llama"), path, AdapterSpec(seed=seed, rank=1 + 7 * seed))
        made.append((reader.read(path), TinyCheckpoint(path, partial(merged_with, path))))
    return made


def test_streams_of_a_mixed_batch_equal_their_merged_models(tiny: Tiny, tmp_path: Path) -> None:
    driver = driver_of(tiny, 3)
    made = adapters(driver, tmp_path, 3)
    jobs, expected = [], []
    for prompt in PROMPTS:
        jobs.append(Job(prompt, greedy(NUM_TOKENS)))
        expected += tiny("llama").greedy([prompt], NUM_TOKENS)
        for read, merged in made:
            jobs.append(Job(prompt, greedy(NUM_TOKENS), adapter=read))
            expected += merged.greedy([prompt], NUM_TOKENS)
    assert driver.tokens(jobs) == expected


def test_a_slot_is_given_to_another_adapter_once_no_row_has_it(tiny: Tiny, tmp_path: Path) -> None:
    driver = driver_of(tiny, 1)
    made = adapters(driver, tmp_path, 2)
    for read, merged in (*made, made[0]):
        for prompt in PROMPTS:
            job = Job(prompt, greedy(NUM_TOKENS), adapter=read)
            assert driver.tokens([job]) == merged.greedy([prompt], NUM_TOKENS)
