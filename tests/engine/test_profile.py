"""A trace of a real model: Chrome's format, with what the compute thread did."""

import asyncio
import gzip
import json
from pathlib import Path

from tests.fakes.engine_driver import EngineDriver, Job, greedy
from tests.fakes.tiny import Tiny, prompt_of
from tokenmesh.services.worker_svc.profiling import Profiling
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import WorkerId


async def test_the_steps_between_start_and_stop_are_in_the_trace(
    tiny: Tiny, tmp_path: Path
) -> None:
    driver = EngineDriver(tiny("llama").directory, native_kernels=False)
    settings = WorkerSettings(profiler_dir=str(tmp_path))
    profiling = Profiling(settings, WorkerId("worker-1"), driver.model.make_trace)
    await profiling.start()
    job = Job(prompt_of(20), greedy(4))
    await asyncio.to_thread(driver.run, [job])
    profiled = await profiling.stop()
    with gzip.open(profiled.path) as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "cpu_op"]
    # one step of prefill and three of decode, an embedding each
    assert names.count("aten::index_select") >= 4
    assert any("linear" in name for name in names)
