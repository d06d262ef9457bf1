"""build_pool_runner: settings -> a loaded model that pools, ready for the engine."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from tokenmesh.engine.adapters.read import AdapterReader
from tokenmesh.engine.exec.choose_dtype import choose_dtype
from tokenmesh.engine.exec.cuda.make import check_compiler, check_facts
from tokenmesh.engine.exec.features import WorkerKind, check_features
from tokenmesh.engine.exec.kv_bytes import KvBytes
from tokenmesh.engine.exec.loaded_model import LoadedPooler
from tokenmesh.engine.exec.maker import gpu_budget
from tokenmesh.engine.exec.memory import GpuBudget, StoreSize, size_store
from tokenmesh.engine.exec.page_dtype import page_dtype_of
from tokenmesh.engine.exec.pool_runner import PoolRunner
from tokenmesh.engine.exec.role import ALONE_ROLE, Role
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.exec.store_maker import StoreMaker
from tokenmesh.engine.layers.device_step import on_device
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.media_facts import TEXT_ONLY
from tokenmesh.engine.models.api import Progress
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.keeps import row_bytes
from tokenmesh.engine.models.kv_scales import NO_SCALES, KvScales, read_kv_scales
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.pooling.api import PoolModel
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.models.pooling.heads import LabelHead, PoolHead, TokenLogits
from tokenmesh.engine.models.pooling.kind import read_pooling, stated_length
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.engine.models.token_ids import check_tokenizer_ids
from tokenmesh.kernels import native as native_kernels
from tokenmesh.kernels.page_codes import FP8
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

if TYPE_CHECKING:
    from tokenmesh.engine.models.tree.facts import HfFacts

_FEWEST_BLOCKS: Final = 2
"""A model that keeps nothing has the null block and one that every row names."""


def build_pool_runner(
    model: ModelSettings,
    worker: WorkerSettings,
    directory: Path,
    raw: RawConfig,
    device: torch.device,
    progress: Progress,
    role: Role = ALONE_ROLE,
) -> LoadedPooler:
    """Load a checkpoint for pooling, or a rank's part; blocks. Raises CheckpointError or
    ConfigError."""
    from tokenmesh.engine.models.tree.pooling.build import build_pooler

    pooling = read_pooling(model, raw, directory)
    facts = _read_facts(model, directory, raw, pooling)
    is_host = device.type == "cpu"
    check_features(WorkerKind(pools=True, is_gpu=not is_host), model, worker)
    if not is_host:
        check_facts(facts)
        check_compiler()
    dtype = choose_dtype(model, facts, directory, device)
    has_kernels = is_host and worker.native_kernels and native_kernels.has_started()
    page_dtype = page_dtype_of(worker, dtype, device, raw)
    scales = read_kv_scales(directory) if page_dtype in FP8 else NO_SCALES

    @torch.inference_mode()
    def load(show: Progress) -> PoolModel:
        checkpoint = Checkpoint(
            directory, device, worker.load_buffer_bytes, scales.names, facts.is_extra
        )
        is_exact = worker.float32_matmul_precision == "highest"
        given = (facts, pooling, checkpoint, dtype, show, has_kernels, is_exact)
        return build_pooler(*given, role.ranks)

    gpu = gpu_budget(device, worker)
    loaded = load(progress)
    longest = stated_length(model, facts.max_position, directory)
    maker = _store_maker(loaded, worker, device, page_dtype, scales, longest)
    with torch.inference_mode():
        runner, store = _make_runner(loaded, facts, maker, gpu, role)
    return LoadedPooler(
        runner=runner,
        facts=facts,
        pooling=_with_head(pooling, facts, loaded.head),
        max_model_len=longest,
        resident=role.make_resident(runner, loaded, store, partial(load, lambda done, total: None)),
        kv_bytes=KvBytes(maker.need.block_bytes, row_bytes(loaded.keeps)),
        adapters=role.share_adapters(AdapterReader(loaded.sites, dtype, worker.lora.max_lora_rank)),
    )


def _store_maker(
    loaded: PoolModel,
    worker: WorkerSettings,
    device: torch.device,
    page_dtype: torch.dtype,
    scales: KvScales,
    longest: int,
) -> StoreMaker:
    return StoreMaker(
        keeps=loaded.keeps,
        grouping=loaded.grouping,
        settings=worker,
        dtype=loaded.dtype,
        device=device,
        page_dtype=page_dtype,
        max_model_len=longest,
        can_save=False,
        kv_scales=scales,
    )


def _make_runner(
    loaded: PoolModel, facts: "HfFacts", maker: StoreMaker, gpu: GpuBudget | None, role: Role
) -> tuple[PoolRunner, KvStore]:
    need, worker = maker.need, maker.settings
    size = StoreSize(_FEWEST_BLOCKS)
    if loaded.keeps:
        profile = partial(_profile, loaded, maker)
        measure = partial(maker.budget, gpu, profile, role.local_world)
        size = StoreSize(role.ranks.least(size_store(need, worker, measure).num_blocks))
    store = maker.make(size)
    max_blocks = max(1, need.groups.blocks_of(maker.max_model_len)) if loaded.keeps else 1
    rows = HostRows(worker.num_rows, max_blocks, facts, len(store.grouping.windows) - 1)
    is_async = worker.async_scheduling is True
    return role.make_pool_runner(loaded, store, rows, is_async=is_async), store


def _read_facts(
    model: ModelSettings, directory: Path, raw: RawConfig, pooling: PoolingFacts
) -> "HfFacts":
    from tokenmesh.engine.models.tree.pooling.build import read_pool_facts

    facts = read_pool_facts(raw, directory, pooling)
    if model.language_model_only:
        facts = replace(facts, media=TEXT_ONLY)
    check_tokenizer_ids(model, raw, facts.vocab_size)
    return facts


def _with_head(pooling: PoolingFacts, facts: "HfFacts", head: PoolHead) -> PoolingFacts:
    """Return what only the loaded head shows."""
    padding: int | None = None
    if pooling.is_causal and "classify" in pooling.tasks and isinstance(head, LabelHead):
        # classifiers of transformers skip it at a prompt's end, even if it is what ends texts
        is_classifier = not isinstance(head.logits, TokenLogits)
        padding = facts.config.get_text_config().pad_token_id if is_classifier else None
    tasks = pooling.tasks
    if isinstance(head, LabelHead) and head.of_each is None and not pooling.labels_tokens:
        tasks = tuple(each for each in tasks if each != "token_classify")
    if not tasks:
        problem = "pooling_task is token_classify; the classifier of this model cannot be put to"
        raise ConfigError(f"{problem} each token", param="pooling_task")
    return replace(pooling, tasks=tasks, reads_all=head.takes != ("lasttoken",), padding_id=padding)


def _profile(loaded: PoolModel, maker: StoreMaker) -> int:
    """Compute the states of the longest chunk; bytes of a store that is just large enough."""
    count = min(maker.settings.max_num_batched_tokens, maker.max_model_len)
    page_size, groups = maker.settings.block_size, len(maker.grouping.windows)
    tables = torch.arange(1, 1 + -(-count // page_size))[None]
    store = maker.make(StoreSize(1 + tables.numel()))
    step = HostStep(
        starts=[0],
        counts=[count],
        numbers=[0],
        all_tables=tables,
        page_size=page_size,
        token_lengths=range(1, count + 1),
        windowed_tables=[tables] * (groups - 1),
    )
    ids = torch.zeros(count, dtype=torch.int64, device=maker.device)
    loaded.states(ids, None, on_device(step, maker.device), store)
    return store.nbytes
