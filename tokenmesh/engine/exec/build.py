"""build_runner: settings -> a loaded model that is ready for the engine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from tokenmesh.engine.adapters.read import AdapterReader
from tokenmesh.engine.exec.choose_dtype import choose_dtype
from tokenmesh.engine.exec.cuda.graphs import GraphProgress
from tokenmesh.engine.exec.cuda.make import check_compiler, check_facts, warm_up
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.exec.device import device_of
from tokenmesh.engine.exec.draft_build import DraftMaker, DraftTarget
from tokenmesh.engine.exec.features import WorkerKind, check_features
from tokenmesh.engine.exec.loaded_model import RunnableModel
from tokenmesh.engine.exec.maker import LoadTimes, RunnerMaker, gpu_budget
from tokenmesh.engine.exec.page_dtype import page_dtype_of
from tokenmesh.engine.exec.role import ALONE_ROLE, Role
from tokenmesh.engine.models.api import LanguageModel, ModelFacts, Progress
from tokenmesh.engine.models.kv_scales import NO_SCALES, read_kv_scales
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.engine.models.token_ids import check_tokenizer_ids, read_eos
from tokenmesh.kernels import native as native_kernels
from tokenmesh.kernels.page_codes import FP8
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

NATIVE_SPIN_US: Final = 50.0
"""Microseconds that threads of the C kernels look for more work before they sleep."""
_ALL_THREADS: Final = torch.get_num_threads()
"""A process alone computes with so many."""

logger = logging.getLogger(__name__)


def start_device(worker: WorkerSettings, local_world: int = 1) -> torch.device:
    """Set the number of threads and start the C kernels; the device."""
    if worker.cpu_threads is not None:
        torch.set_num_threads(worker.cpu_threads)
    elif local_world > 1:
        torch.set_num_threads(max(1, _ALL_THREADS // local_world))
    device = device_of(worker)
    if worker.native_kernels and device.type == "cpu":
        native_kernels.start(
            torch.get_num_threads(),
            NATIVE_SPIN_US,
            Path(worker.native_cache_dir),
        )
    return device


def build_runner(
    model: ModelSettings, worker: WorkerSettings, progress: Progress, role: Role = ALONE_ROLE
) -> RunnableModel:
    """Load a checkpoint, or a rank's part, and allocate its KV pool; blocks.

    Sets the process's number of torch threads. Raises CheckpointError or ConfigError.
    """
    device = start_device(worker, role.local_world)
    native = worker.native_kernels and device.type == "cpu" and native_kernels.has_started()
    maker = replace(_maker_of(model, worker, native, device), role=role)
    # what cannot draft is refused before any weights are read
    drafting = _drafting(model, worker, maker, native) if role.ranks.leads else None
    with torch.inference_mode():
        gpu = gpu_budget(maker.device, worker)
        with fitting(f"{_weights_of(maker)} do not fit the GPU", "model"):
            loaded, times = maker.load(progress)
        if drafting is not None:
            maker = replace(maker, draft=drafting.load(loaded))
        began_s = perf_s()
        # the pool gets a share of what the weights have left
        size = maker.size_store(loaded, partial(maker.budget_of, loaded, gpu))
        maker = maker.fitted(loaded, size)
        with fitting(
            "the KV pool does not fit the GPU; lower what sets its size", "gpu_memory_utilization"
        ):
            runner, store = maker.make_runner(loaded, size)
        pool_s = perf_s() - began_s
    if isinstance(runner, CudaRunner):
        _get_ready(runner, maker)
    _log(maker, times, store)
    return RunnableModel(
        runner=runner,
        facts=maker.facts,
        dtype=str(maker.dtype).removeprefix("torch."),
        max_model_len=maker.max_model_len,
        eos_token_ids=maker.eos_token_ids,
        resident=role.make_resident(runner, loaded, store, partial(_reload, maker)),
        times=times,
        pool_s=pool_s,
        kv_bytes=maker.kv_bytes(loaded),
        shared_kv=maker.shared_kv(runner, store),
        adapters=role.share_adapters(
            AdapterReader(loaded.sites, maker.dtype, worker.lora.max_lora_rank)
        ),
    )


def _drafting(
    model: ModelSettings, worker: WorkerSettings, maker: RunnerMaker, native: bool
) -> DraftMaker | None:
    target = DraftTarget(
        settings=model,
        directory=maker.directory,
        facts=maker.facts,
        worker=worker,
        device=maker.device,
        dtype=maker.dtype,
        native=native,
        raw=read_config(maker.directory),
        share_ends=maker.role.share_ends,
    )
    return DraftMaker.of(target)


def _get_ready(runner: CudaRunner, maker: RunnerMaker) -> None:
    """Record graphs and compile kernels, which the first requests would wait for."""
    problem = (
        "CUDA graphs do not fit the GPU; lower gpu_memory_utilization or max_cudagraph_capture_size"
    )
    with fitting(problem, "gpu_memory_utilization"):
        runner.make_graphs(runner.graph_sizes, GraphProgress())
        warm_up(runner, maker.settings, maker.max_model_len)


@contextmanager
def fitting(problem: str, setting: str) -> Iterator[None]:
    """Turn a lack of device memory into a ConfigError that names the setting to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{problem}: {error}", param=setting) from error


def _weights_of(maker: RunnerMaker) -> str:
    size = sum(file.stat().st_size for file in maker.directory.glob("*.safetensors"))
    is_plain = maker.facts.quantization is None
    what = "weights" if is_plain else "quantized weights, decoded when they are loaded,"
    return f"{size / (1 << 30):.2f} GiB of {what}"


def _maker_of(
    model: ModelSettings, worker: WorkerSettings, native: bool, device: torch.device
) -> RunnerMaker:
    directory = locate(model, with_code=model.trust_remote_code)
    raw = read_config(directory)
    facts = read_model_facts(raw, directory, model)
    check_tokenizer_ids(model, raw, facts.vocab_size)
    check_features(WorkerKind(pools=False, is_gpu=device.type == "cuda"), model, worker)
    if device.type == "cuda":
        check_facts(facts)
        check_compiler()
    dtype = choose_dtype(model, facts, directory, device, native)
    page_dtype = page_dtype_of(worker, dtype, device, raw)
    return RunnerMaker(
        facts=facts,
        directory=directory,
        dtype=dtype,
        max_model_len=_max_model_len(model, facts),
        may_be_shorter=model.max_model_len == "auto",
        eos_token_ids=read_eos(raw, directory, model, facts.vocab_size),
        settings=worker,
        native=native,
        device=device,
        page_dtype=page_dtype,
        kv_scales=read_kv_scales(directory) if page_dtype in FP8 else NO_SCALES,
        speculative_config=model.speculative_config,
    )


@torch.inference_mode()
def _reload(maker: RunnerMaker) -> LanguageModel:
    """The weights once more, for a worker that wakes up."""
    loaded, times = maker.load(lambda done, total: None)
    logger.info("read %s", _speed(times))
    return loaded


def _log(maker: RunnerMaker, times: LoadTimes, store: KvStore) -> None:
    saved = f" and {store.num_saved} saved states" if store.num_saved else ""
    logger.info(
        "loaded %s in %s: %s; KV pool in %s of %d blocks%s, %.2f GiB",
        maker.directory,
        maker.dtype,
        _speed(times),
        maker.page_dtype,
        store.num_blocks,
        saved,
        store.nbytes / (1 << 30),
    )


def _speed(times: LoadTimes) -> str:
    """`0.92 GiB in 2.4 s, 0.8 s of it reading at 1.2 GB/s`."""
    rate = times.num_bytes / 1e9 / max(times.read_s, 1e-9)
    return (
        f"{times.num_bytes / (1 << 30):.2f} GiB in {times.read_s + times.pack_s:.1f} s, "
        f"{times.read_s:.1f} s of it reading at {rate:.1f} GB/s"
    )


def _max_model_len(model: ModelSettings, facts: ModelFacts) -> int:
    longest, stated = facts.max_position, model.stated_len
    if stated is not None and stated > longest:
        raise ConfigError(
            f"max_model_len is {stated}; {model.model} was made for {longest}",
            param="max_model_len",
        )
    return stated or longest
