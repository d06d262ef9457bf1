"""Sleep and wake of a real model: memory goes and comes back, the tokens stay the same."""

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.engine_driver import EngineDriver, Job, greedy, load
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.engine.exec.resident import (
    bring_back,
    give_back,
    put_aside,
    tensors_of,
)
from tokenmesh.kernels import huge_pages
from tokenmesh.kernels.linear import Linear, PlainWeight
from tokenmesh.shared.errors import CheckpointError, Unavailable

PROMPT = prompt_of(40)
ALL = ("weights", "kv_cache")


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may damage."""
    return lambda name: Path(shutil.copytree(tiny(name).directory, tmp_path / name))


def tokens(driver: EngineDriver) -> list[int]:
    return driver.tokens([Job(PROMPT, greedy(12))])[0]


@pytest.mark.parametrize("level", [1, 2])
def test_the_tokens_after_sleep_are_those_before_it(tiny: Tiny, level: int) -> None:
    driver = EngineDriver(tiny("llama").directory)
    before = tokens(driver)
    freed = driver.sleep(level)
    assert driver.model.resident.level == level
    driver.model.resident.wake(ALL)
    assert driver.model.resident.level == 0
    (outcome,) = driver.run([Job(PROMPT, greedy(12))])
    assert outcome.token_ids == before
    assert outcome.num_cached == 0, "what the pool held is gone"
    assert driver.run([Job(PROMPT, greedy(12))])[0].num_cached == 32
    pool_bytes = 256 * 16 * 2 * 3 * 2 * 16 * 4
    assert freed >= pool_bytes if level == 2 else freed == pool_bytes


def test_asleep_the_memory_is_really_gone(tiny: Tiny) -> None:
    model, _ = load(tiny("llama").directory, num_gpu_blocks_override=4096)
    pool = kv_pool(model)
    # the rest of a long test run comes and goes alongside it
    most = 0.6 * pool.nbytes
    gc.collect()
    before = resident_bytes()
    with torch.inference_mode():
        pool.fill_(1.0)
    filled = resident_bytes()
    assert filled - before > most
    assert model.resident.sleep(1) == pool.nbytes
    assert filled - resident_bytes() > most
    model.resident.wake(["kv_cache"])
    assert float(pool[:, :, 0].abs().sum()) == 0, "the null block is finite"
    # pages come when they are written
    assert filled - resident_bytes() > most


def kv_pool(model: Any) -> torch.Tensor:
    return model.resident._store.pool  # type: ignore[no-any-return]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("make", [huge_pages.empty, torch.empty], ids=["large pages", "plain"])
def test_pages_are_given_back_and_only_those_of_the_tensor(make: Callable[..., Any]) -> None:
    whole = make((40 << 20,), dtype=torch.uint8).fill_(7)
    before = resident_bytes()
    part = whole[1000 : 32 << 20]
    give_back(part)
    assert before - resident_bytes() > 28 << 20
    assert bool((whole[:1000] == 7).all())
    assert bool((whole[32 << 20 :] == 7).all())
    assert int(part[4096:].count_nonzero()) < 2 * 4096
    part.fill_(3)
    assert bool((part == 3).all())
    give_back(whole[5:5])
    give_back(whole[5:9])
    assert bool((part == 3).all())


def test_level_2_leaves_no_weight_behind(tiny: Tiny) -> None:
    model, _ = load(tiny("llama").directory)
    weights = [weakref.ref(each) for each in tensors_of(model.resident._model)]
    assert len(weights) > 10
    model.resident.sleep(2)
    assert [each() for each in weights if each() is not None] == []


def test_sleep_and_wake_may_be_requested_twice_and_in_parts(tiny: Tiny) -> None:
    driver = EngineDriver(tiny("llama").directory)
    resident = driver.model.resident
    before = tokens(driver)
    assert driver.sleep(1) > 0
    assert driver.sleep(1) == 0
    assert driver.sleep(2) > 0
    assert driver.sleep(1) == 0, "a deeper sleep is not undone"
    assert resident.level == 2
    resident.wake(["kv_cache"])
    assert resident.level == 2
    resident.wake([])
    resident.wake(["weights"])
    assert resident.level == 0
    resident.wake(ALL)
    assert tokens(driver) == before


def test_weights_that_are_gone_leave_the_worker_asleep_until_they_are_back(
    copy: Callable[[str], Path],
) -> None:
    directory = copy("llama")
    driver = EngineDriver(directory)
    before = tokens(driver)
    driver.sleep(2)
    moved = directory.rename(directory.with_name("away"))
    with pytest.raises(CheckpointError):
        driver.model.resident.wake(ALL)
    assert driver.model.resident.level == 2
    moved.rename(directory)
    driver.model.resident.wake(ALL)
    assert tokens(driver) == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_used_by_other_processes_is_reported(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    driver = EngineDriver(tiny("llama").directory)
    driver.sleep(2)

    def explode(*_: object) -> None:
        raise error

    monkeypatch.setattr(driver.model.resident, "_load", explode)
    with pytest.raises(Unavailable, match="not enough memory to wake up: "):
        driver.model.resident.wake(ALL)
    assert driver.model.resident.level == 2


def test_a_defect_is_not_taken_for_a_lack_of_memory(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = EngineDriver(tiny("llama").directory)
    driver.sleep(2)

    def explode(*_: object) -> None:
        raise RuntimeError("a shape is wrong")

    monkeypatch.setattr(driver.model.resident, "_load", explode)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        driver.model.resident.wake(ALL)


def test_weights_put_aside_come_back_in_place() -> None:
    """The way of a GPU's weights, on a CPU: views and tied tensors share one storage."""
    embedding, bias = torch.randn(6, 5), torch.randn(5)
    weight = PlainWeight(embedding.t(), bias)
    expected = embedding.clone(), bias.clone()
    aside = put_aside([embedding, (Linear(weight), None, 3)])
    assert (embedding.untyped_storage().nbytes(), bias.untyped_storage().nbytes()) == (0, 0)
    assert sum(host.nbytes for _, host in aside) == (30 + 5) * 4
    bring_back(aside)
    assert aside == []
    assert torch.equal(embedding, expected[0])
    assert torch.equal(weight.weight, expected[0].t())
    assert torch.equal(bias, expected[1])


def test_a_host_without_room_for_the_weights_leaves_them_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [torch.randn(6, 5), torch.randn(7)]
    expected = [each.clone() for each in weights]
    real, calls = torch.empty, []

    def scarce(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.raises(RuntimeError, match="can't allocate"):
        put_aside(weights)
    monkeypatch.undo()
    assert len(calls) == 2
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
