"""build_pool_runner: settings -> a loaded model that pools, ready for the engine."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from tokenmesh.kernels import native as native_kernels
from tokenmesh.services.worker_svc.loaded import KvBytes
from tokenmesh.services.worker_svc.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.services.worker_svc.models.api import ModelFacts, Progress
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.keeps import KvStore, make_store, row_bytes
from tokenmesh.services.worker_svc.models.pooling.api import PoolModel
from tokenmesh.services.worker_svc.models.pooling.facts import PoolingFacts
from tokenmesh.services.worker_svc.models.pooling.kind import read_pooling, stated_length
from tokenmesh.services.worker_svc.models.raw_config import RawConfig
from tokenmesh.services.worker_svc.models.token_ids import check_tokenizer_ids
from tokenmesh.services.worker_svc.runner.device import available_host_bytes
from tokenmesh.services.worker_svc.runner.memory import Need, host_budget, need_of, size_store
from tokenmesh.services.worker_svc.runner.pool_runner import PoolRunner
from tokenmesh.services.worker_svc.runner.resident import TorchResident
from tokenmesh.services.worker_svc.runner.rows import HostRows
from tokenmesh.services.worker_svc.runner.runner import TorchTrace
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

ChooseDtype = Callable[[ModelSettings, ModelFacts, Path, torch.device], torch.dtype]


@dataclass(frozen=True, slots=True)
class LoadedPooler:
    """A loaded model that pools. Implements `Loaded`."""

    runner: PoolRunner
    facts: ModelFacts
    pooling: PoolingFacts
    max_model_len: int
    resident: TorchResident
    kv_bytes: KvBytes
    make_trace: type[TorchTrace] = TorchTrace
    has_grammars: bool = False
    media: MediaFacts = TEXT_ONLY
    adapters: None = None
    encoder_states: int = 0
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.facts.hidden_size

    @property
    def rope_boundary(self) -> int | None:
        return self.facts.rope_boundary

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        return self.facts.cache_salt(salt, num_prompt)


def build_pool_runner(
    model: ModelSettings,
    worker: WorkerSettings,
    directory: Path,
    raw: RawConfig,
    device: torch.device,
    choose_dtype: ChooseDtype,
    progress: Progress,
) -> LoadedPooler:
    """Load a checkpoint for pooling; blocks. Raises CheckpointError or ConfigError."""
    from tokenmesh.services.worker_svc.models.hf.pooling.build import build_pooler, read_pool_facts

    if device.type != "cpu":
        raise ConfigError("models that pool run on a CPU only so far", param="worker.device")
    pooling = read_pooling(model, raw, directory)
    facts = read_pool_facts(raw, directory, pooling)
    check_tokenizer_ids(model, raw, facts.vocab_size)
    dtype = choose_dtype(model, facts, directory, device)
    has_kernels = worker.native_kernels and native_kernels.has_started()

    @torch.inference_mode()
    def load(show: Progress) -> PoolModel:
        checkpoint = Checkpoint(directory, device, worker.load_buffer_bytes)
        return build_pooler(facts, pooling, checkpoint, dtype, show, has_kernels)

    loaded = load(progress)
    longest = stated_length(model, facts.max_position, directory)
    with torch.inference_mode():
        store, need = _store_of(loaded, worker, longest)
        rows = HostRows(
            *(worker.num_rows, max(1, need.groups.blocks_of(longest) if loaded.keeps else 1)),
            *(facts, len(store.grouping.windows) - 1),
        )
        runner = PoolRunner(loaded, store, rows, is_async=worker.async_scheduling is True)
    return LoadedPooler(
        runner=runner,
        facts=facts,
        pooling=replace(pooling, reads_all=loaded.head.takes != ("lasttoken",)),
        max_model_len=longest,
        resident=TorchResident(runner, loaded, store, partial(load, lambda done, total: None)),
        kv_bytes=KvBytes(need.block_bytes, row_bytes(loaded.keeps)),
    )


def _store_of(loaded: PoolModel, worker: WorkerSettings, longest: int) -> tuple[KvStore, Need]:
    need = need_of(*(loaded.keeps, loaded.grouping, worker, loaded.dtype, longest), can_save=False)
    num_blocks = 2
    if loaded.keeps:
        budget = partial(host_budget, available_host_bytes(), worker.cpu_memory_utilization)
        num_blocks = size_store(need, worker, budget).num_blocks
    store = make_store(
        *(loaded.keeps, num_blocks, worker.block_size, worker.num_rows),
        *(loaded.dtype, torch.device("cpu"), loaded.grouping),
    )
    return store, need
