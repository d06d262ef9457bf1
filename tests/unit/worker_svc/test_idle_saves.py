"""Blocks that are filled last are saved by an engine that has nothing else to do."""

from random import Random

import pytest

from tests.fakes.kv_runner import KvRunner
from tests.unit.worker_svc.test_host_fills import LENGTH, request_of, run
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.plan import StepPlan
from tokenmesh.shared.config.worker import WorkerSettings

SIZE = 4


def engine_of(num_images: int) -> tuple[Engine, KvRunner]:
    settings = WorkerSettings(
        max_num_seqs=2, max_num_batched_tokens=200, block_size=SIZE, async_scheduling=True
    )
    runner = KvRunner(settings, 100, Random(0), 0.0, 0.0, num_images=num_images)
    return Engine(runner, settings), runner


def test_every_block_of_the_last_stream_has_an_image_when_the_engine_is_idle() -> None:
    engine, _ = engine_of(num_images=60)
    # the stream ends as it fills a block
    request = request_of(0, "a", 3, SIZE + 1)
    run(engine, [request])
    host = engine._cache.host
    assert host is not None
    assert host.states["ready"] == (LENGTH + SIZE) // SIZE
    assert not engine.has_work


def test_an_engine_whose_slots_are_all_held_comes_to_rest() -> None:
    engine, _ = engine_of(num_images=2)
    run(engine, [request_of(0, "a", 3)])
    keys = list(engine._cache.host._ready)  # type: ignore[union-attr]
    assert len(engine.exchange.lend(keys)) == len(keys) == 2
    run(engine, [request_of(1, "a", 5)])
    assert not engine.has_work


def test_a_save_that_fails_leaves_no_image_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = engine_of(num_images=60)
    carry_out = runner._carry_out

    def fail(plan: StepPlan) -> object:
        if not plan.num_rows:
            raise MemoryError("no room")
        return carry_out(plan)

    monkeypatch.setattr(runner, "_carry_out", fail)
    request = request_of(0, "a", 3, SIZE + 1)
    run(engine, [request])
    host = engine._cache.host
    assert host is not None
    assert host.states["ready"] + host.states["free"] == 60
    assert host.states["ready"] < (LENGTH + SIZE) // SIZE
    assert "blocks were not saved" in caplog.text
    again = request_of(1, "a", 3)
    run(engine, [again])
    assert again.token_ids[: LENGTH + 3] == request.token_ids[: LENGTH + 3]
