"""RunnerMaker: makes the parts of a runner from one checkpoint: weights, pool, rows, sampler."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch

from tokenmesh.engine.device_memory import CudaMemory
from tokenmesh.engine.exec.arena import make_arena
from tokenmesh.engine.exec.branches import Branches, blocks_of_chain, num_tables
from tokenmesh.engine.exec.cuda.forward import KINDS
from tokenmesh.engine.exec.cuda.graphs import graph_bytes
from tokenmesh.engine.exec.cuda.make import make_cuda_runner
from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.exec.draft_build import Draft
from tokenmesh.engine.exec.kv_bytes import KvBytes
from tokenmesh.engine.exec.memory import (
    GpuBudget,
    MemoryBudget,
    StoreSize,
    size_store,
)
from tokenmesh.engine.exec.profile_run import AnyRunner, run_largest_steps
from tokenmesh.engine.exec.role import ALONE_ROLE, Role
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.exec.store_maker import StoreMaker
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.models.api import LanguageModel, ModelFacts, Progress
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.keeps import cross_bytes, row_bytes, token_bytes
from tokenmesh.engine.models.kv_scales import NO_SCALES, KvScales
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.load import load_model
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.scope import scope_of
from tokenmesh.engine.sampling.sampler import Sampler
from tokenmesh.kernels.native.build import level
from tokenmesh.shared.clock import perf_s
from tokenmesh.shared.config.speculative import SpeculativeConfig
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """It holds what loading took, in seconds."""

    num_bytes: int
    """Read from the checkpoint."""
    read_s: float
    """In the file system."""
    pack_s: float
    """Converting, merging, packing: all that is not reading."""


@dataclass(frozen=True, slots=True)
class RunnerMaker:
    """It holds what a runner is made from. Use it within `torch.inference_mode()`."""

    facts: ModelFacts
    directory: Path
    dtype: torch.dtype
    max_model_len: int
    may_be_shorter: bool
    """It tells whether max_model_len may be lowered to what the KV memory holds."""
    eos_token_ids: frozenset[int]
    settings: WorkerSettings
    native: bool
    """It tells whether the C kernels run."""
    device: torch.device
    page_dtype: torch.dtype
    """It is the type of pages and latents."""
    kv_scales: KvScales = NO_SCALES
    """They are the checkpoint's, where pages are 8-bit floats."""
    draft: Draft | None = None
    """It holds what drafts for the model, once it is loaded."""
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    role: Role = ALONE_ROLE

    def load(self, progress: Progress) -> tuple[LanguageModel, LoadTimes]:
        """Read the weights. Raises CheckpointError, ConfigError, and torch.OutOfMemoryError."""
        began_s = perf_s()
        checkpoint = Checkpoint(
            self.directory,
            self.device,
            self.settings.load_buffer_bytes,
            self.kv_scales.names,
            self.facts.is_extra,
        )
        ranks = self.role.ranks
        model = load_model(self.facts, checkpoint, self.dtype, progress, self.native, ranks)
        if self.settings.batch_invariant and not model.has_program:
            raise ConfigError(
                "batch_invariant needs the C kernels: a CPU with AVX2, a C compiler, "
                "native_kernels on, and heads of a multiple of 16 features, at most 256",
                param="worker.batch_invariant",
            )
        read_s = checkpoint.read_s
        times = LoadTimes(checkpoint.bytes_read, read_s, perf_s() - began_s - read_s)
        return model, times

    def budget_of(self, model: LanguageModel, gpu: GpuBudget | None) -> MemoryBudget:
        """Measure what the pool may take, once the weights are there."""
        profile = partial(self._profile, model)
        return self._store_maker(model).budget(gpu, profile, self.role.local_world)

    def size_store(self, model: LanguageModel, measure: Callable[[], MemoryBudget]) -> StoreSize:
        """Return what the store holds, on every rank. Raises ConfigError when one request would not
        fit.

        On several ranks it is what fits the one with least memory.
        """
        need, ranks = self._store_maker(model).need, self.role.ranks
        size = size_store(need, self.settings, measure)
        return StoreSize(ranks.least(size.num_blocks), ranks.least(size.num_saved))

    def fitted(self, model: LanguageModel, size: StoreSize) -> Self:
        """With the length that such a store holds."""
        return replace(
            self, max_model_len=self._store_maker(model).need.longest_in(size.num_blocks)
        )

    def make_runner(self, model: LanguageModel, size: StoreSize) -> tuple[AnyRunner, KvStore]:
        """A runner, without graphs yet, and its store."""
        worker = self.settings
        tree = self.speculative_config.tree
        further = num_tables(tree, self._num_drafted_rows(model))
        num_blocks = size.num_blocks + further * self._blocks_of_chain
        store = self._store_maker(model).make(size._replace(num_blocks=num_blocks))
        if self.device.type == "cuda":
            eos = self.eos_token_ids
            return make_cuda_runner(model, store, eos, worker, self.max_model_len), store
        max_blocks = -(-self.max_model_len // worker.block_size)
        num_windowed = len(store.grouping.windows) - 1
        rows = HostRows(worker.num_rows, max_blocks, self.facts, num_windowed, further)
        sampler = Sampler(
            self.facts.vocab_size,
            self.eos_token_ids,
            worker.grammar_step_s,
            shows_processed=worker.logprobs_mode == "processed_logprobs",
        )
        is_async = worker.async_scheduling is True
        arena = make_arena(store, worker, self.role.local_world, self.role.ranks.least)
        drafter = None
        if self.draft is not None:
            drafter = self.draft.drafter(size.num_blocks, rows, sampler)
        branches = None
        if tree is not None:
            branches = Branches(store, rows, tree, worker.num_rows, size.num_blocks)
        runner = self.role.make_runner(
            *(model, store, rows, sampler),
            is_async=is_async,
            arena=arena,
            drafter=drafter,
            branches=branches,
        )
        return runner, store

    def shared_kv(self, runner: AnyRunner, store: KvStore) -> SharedKv | None:
        """Return what other workers must know of its KV; None: none is exchanged. Blocks while it
        reads samples of the weights."""
        arena = runner.shared_arena if isinstance(runner, TorchRunner) else None
        if arena is None:
            if self.settings.kv.is_used and isinstance(runner, CudaRunner):
                logger.warning(
                    "KV leaves workers on CPUs only (kv.role, kv.disk_dir, kv.mooncake_master)"
                )
            return None
        kernels = level() if self.native else torch.backends.cpu.get_cpu_capability()
        computed_by = f"{kernels} {self.native} torch {torch.__version__}"
        scope = scope_of(self.directory, store, self.dtype, self.page_dtype, computed_by)
        size = store.page_size
        return SharedKv(arena, scope, -(-store.image_bytes // size), size)

    def kv_bytes(self, model: LanguageModel) -> KvBytes:
        """Return what blocks and rows of the store take."""
        of_row = row_bytes(model.keeps) + cross_bytes(model.keeps, self.dtype)
        return KvBytes(self._store_maker(model).need.block_bytes, of_row, self.device.type == "cpu")

    def _store_maker(self, model: LanguageModel) -> StoreMaker:
        return StoreMaker(
            keeps=model.keeps,
            grouping=model.grouping,
            settings=self.settings,
            dtype=self.dtype,
            device=self.device,
            page_dtype=self.page_dtype,
            max_model_len=self.max_model_len,
            can_save=self.device.type == "cpu",
            may_be_shorter=self.may_be_shorter,
            kv_scales=self.kv_scales,
            first_layer=model.config.first_layer if isinstance(model, Decoder) else 0,
            draft_bytes=0 if self.draft is None else self.draft.token_bytes,
            open_draft_bytes=self._open_draft_bytes(model),
            host_tier_bytes=self.settings.host_tier_bytes,
        )

    def _open_draft_bytes(self, model: LanguageModel) -> int:
        """Return what rows with drafts keep until these are verified: copies of their states, the
        probabilities with which drafts were drawn, and blocks for chains that branch."""
        config, worker = self.speculative_config, self.settings
        num_rows = self._num_drafted_rows(model)
        num_probs = config.max_drafts * self.facts.vocab_size if config.draws_apart else 0
        further = num_tables(config.tree, num_rows) * self._blocks_of_chain * worker.block_size
        of_token = token_bytes(model.keeps, model.grouping, self.page_dtype) if further else 0
        of_row = row_bytes(model.keeps) + num_probs * torch.float32.itemsize
        return num_rows * of_row + further * of_token

    def _num_drafted_rows(self, model: LanguageModel) -> int:
        """Return the most rows with drafts of a step."""
        if self.device.type == "cuda" or model.write_cross is not None:
            return 0
        has_states = row_bytes(model.keeps) > 0
        return self.speculative_config.max_rows(self.settings.num_rows, has_states=has_states)

    @property
    def _blocks_of_chain(self) -> int:
        tree = self.speculative_config.tree
        if tree is None:
            return 0
        return blocks_of_chain(tree.depth_of(len(tree.paths)), self.settings.block_size)

    def _profile(self, model: LanguageModel) -> int:
        """Take the largest steps next to the largest graphs; bytes that are not needed again."""
        graphs = 0

        def make(num_blocks: int) -> tuple[AnyRunner, KvStore]:
            nonlocal graphs
            runner, store = self.make_runner(model, StoreSize(num_blocks))
            if isinstance(runner, CudaRunner):
                graphs = graph_bytes(
                    CudaMemory(self.device),
                    partial(runner.make_graphs, runner.graph_sizes[-1:]),
                    len(KINDS) * len(runner.graph_sizes),
                )
            return runner, store

        return run_largest_steps(make, self.settings, self.max_model_len) - graphs


def gpu_budget(device: torch.device, settings: WorkerSettings) -> GpuBudget | None:
    """Make it before anything is loaded; None on a CPU."""
    if device.type != "cuda":
        return None
    return GpuBudget(CudaMemory(device), settings.gpu_memory_utilization)
