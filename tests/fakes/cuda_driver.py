"""CudaDriver: the engine on the CUDA runner with a fake GPU.

Its kernels are interpreted, or stand for by their references: then it takes no Triton.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.fakes.cuda_device import HOST, FakeDevice, reading_forbidden
from tests.fakes.engine_driver import EngineDriver, Job, Outcome
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.exec.cuda.launch import CudaLaunch
from tokenmesh.engine.exec.cuda.rows import CudaLimits
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.kv_store import make_store
from tokenmesh.engine.models.load import load_model, read_model_facts
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.sampling.device_sampler import DeviceSampler
from tokenmesh.kernels.dispatch import interpreted_on_cpu, uses_triton
from tokenmesh.shared.config.model import ModelImpl, ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

EOS = frozenset({2})
MAX_MODEL_LEN = 96


class StrictRunner(CudaRunner):
    """Fails when a launch waits for the device, as references do and kernels must not."""

    def launch(self, plan: StepPlan) -> CudaLaunch:
        with reading_forbidden() if uses_triton(self._nothing) else nullcontext():
            return super().launch(plan)


class CudaDriver(EngineDriver):
    """See EngineDriver; use it within `inference_mode`, and one of the ways to run kernels."""

    def __init__(
        self,
        directory: Path,
        on: torch.device = HOST,
        model_impl: ModelImpl = "auto",
        **settings: Any,
    ) -> None:
        worker = {
            "num_gpu_blocks_override": 32,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            **settings,
        }
        self.settings = WorkerSettings.model_validate(worker)
        self.device = FakeDevice(on=on)
        self.runner = make_runner(directory, self.settings, self.device, model_impl)
        self.model: Any = SimpleNamespace(
            eos_token_ids=EOS,
            cache_salt=lambda salt, num_prompt: salt,
            rope_boundary=self.runner._forward.model.facts.rope_boundary,
            media=self.runner._forward.model.facts.media,
        )
        self._engine = Engine(self.runner, self.settings)
        self._num_streams = 0

    @property
    def engine(self) -> Engine:
        """To step it by hand."""
        return self._engine

    @property
    def decoder(self) -> Decoder:
        """Its weights."""
        model = self.runner._forward.model
        assert isinstance(model, Decoder)
        return model

    def request(self, job: Job) -> Request:
        """Return the request that `run` would add to the engine."""
        return self._request(job)


def make_runner(
    directory: Path, settings: WorkerSettings, device: FakeDevice, model_impl: ModelImpl = "auto"
) -> CudaRunner:
    """With graphs unless the settings say otherwise; its pages are full of NaN."""
    raw = read_json(directory / "config.json")
    facts = read_model_facts(
        raw, directory, ModelSettings(model=str(directory), model_impl=model_impl)
    )
    weights = Checkpoint(directory, device.device)
    model = load_model(facts, weights, torch.float32, lambda done, total: None, has_kernels=False)
    assert settings.num_gpu_blocks_override is not None
    num_blocks = settings.num_gpu_blocks_override
    store = make_store(
        model.keeps,
        num_blocks,
        settings.block_size,
        settings.num_rows,
        torch.float32,
        device.device,
        model.grouping,
    )
    for tensor in store.tensors:
        tensor.fill_(float("nan"))
    sampler = DeviceSampler(
        settings.max_num_seqs,
        facts.vocab_size,
        EOS,
        device.device,
        settings.grammar_step_s,
    )
    limits = CudaLimits.of(settings, MAX_MODEL_LEN)
    runner = StrictRunner(model, store, sampler, device, limits)
    runner.make_graphs(runner.graph_sizes)
    return runner


@dataclass(slots=True)
class Report:
    """The results of a run."""

    outcomes: list[Outcome]
    num_replays: int
    num_graphs: int

    @property
    def tokens(self) -> list[list[int]]:
        """Return the tokens of each job, none of which may have failed."""
        assert [outcome.error for outcome in self.outcomes] == [None] * len(self.outcomes)
        return [outcome.token_ids for outcome in self.outcomes]


def run(
    directory: Path, batches: Sequence[Sequence[Job]], steps_between: int, settings: dict[str, Any]
) -> Report:
    """Run batches of jobs one after the other on one engine, in the interpreting child."""
    with torch.inference_mode(), interpreted_on_cpu():
        return drive(CudaDriver(directory, **settings), batches, steps_between)


def drive(driver: CudaDriver, batches: Sequence[Sequence[Job]], steps_between: int = 0) -> Report:
    """Run batches of jobs one after the other."""
    outcomes = [
        outcome for jobs in batches for outcome in driver.run(jobs, steps_between=steps_between)
    ]
    return Report(outcomes, driver.device.num_replays, driver.device.num_graphs)
