"""Divisions of a model over devices: which fit, and what the cost model of the `sim` engine gives.

Memory is what the files, the settings and the planning of the KV pool say. Speeds are a model:
reading weights and KV bounds a decode step, products bound a prefill, and sums are added.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from tokenmesh.engine.capacity.devices import PlannedDevice
from tokenmesh.engine.capacity.weights import ModelBytes
from tokenmesh.engine.core.sim import step_seconds
from tokenmesh.engine.exec.memory import (
    MemoryBudget,
    Need,
    StoreSize,
    host_budget,
    need_of,
    size_store,
)
from tokenmesh.engine.models.keeps import LayerKeeps, Pages, stage_groups, window_groups
from tokenmesh.engine.plan import ScheduledRow, StepPlan
from tokenmesh.engine.ranks.pipe import stages_of
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

_GIB: Final = 1 << 30
_READ_SHARE: Final = 0.75
"""Kernels that read weights once reach this share of a memory's stated speed."""
_PRODUCT_SHARE: Final = 0.45
"""A prefill of a thousand tokens reaches this share of the stated products a second."""
_STEP_S: Final = 2e-4
"""A step takes so long besides its products: planning, drawing, launching."""
_CONTEXT_BYTES: Final = 600 << 20
"""A GPU's context and its loaded kernels take so many."""
MAX_RANKS: Final = 64
"""Tensor parallelism is planned for at most so many."""
_HOP_S: Final = 5e-5
"""Hidden states on their way to the next stage."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model, and the settings of its workers."""

    weights: ModelBytes
    keeps: tuple[LayerKeeps, ...]
    hidden_size: int
    inner_size: int
    vocab_size: int
    expert_share: float
    """A token gets this share of the experts; 1 without experts."""
    max_model_len: int
    may_be_shorter: bool
    page_dtype: torch.dtype
    settings: WorkerSettings
    tokens: int
    """A stream has so many on average, for the speeds."""

    @property
    def kv_heads(self) -> int:
        """KV heads of the whole model; 0 where no layer has pages."""
        found = [each.kv_heads for layer in self.keeps for each in layer if isinstance(each, Pages)]
        return max(found, default=0)

    def keeps_of(self, ranks: int, layers: range) -> tuple[LayerKeeps, ...]:
        """Return what a rank keeps of some layers: a part of their KV heads, all of anything
        else."""
        return tuple(
            tuple(
                replace(each, kv_heads=-(-each.kv_heads // ranks))
                if isinstance(each, Pages)
                else each
                for each in self.keeps[number]
            )
            for number in layers
        )


@dataclass(frozen=True, slots=True)
class Speeds:
    """It holds what the cost model says. Tokens a second are those of all workers together."""

    step_ms: float
    """A stream alone takes so long for each of its tokens."""
    tokens_per_s: float
    """With `streams` on each worker."""
    streams: int
    prefill_tokens_per_s: float
    sim: dict[str, float | int]
    """Settings of a simulated worker that takes as long."""


@dataclass(frozen=True, slots=True)
class Size:
    """One division of the model, and as many workers of it as the devices hold."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    workers: int = 0
    weight_bytes: int = 0
    """The rank with most takes so many."""
    activation_bytes: int = 0
    kv_token_bytes: int = 0
    """One token takes so many on the rank with most."""
    kv_bytes: int = 0
    """The pool takes so many on that rank."""
    kv_tokens: int = 0
    """A worker holds so many."""
    full_length_streams: int = 0
    """Streams of max_model_len that a worker holds at a time."""
    max_model_len: int = 0
    problem: str = ""
    """Why it does not fit or cannot be divided so; empty: it fits."""
    unserved: str = ""
    """Why this version does not serve it; empty: it does."""
    speeds: Speeds | None = None


def divisions(count: int) -> Iterator[tuple[int, int]]:
    """Pairs of ranks and stages that share `count` devices evenly, those with fewest first."""
    pairs = [
        (ranks, stages)
        for ranks in range(1, min(count, MAX_RANKS) + 1)
        for stages in range(1, count // ranks + 1)
        if count % (ranks * stages) == 0
    ]
    return iter(sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1])))


def size_of(
    subject: PlannedModel, device: PlannedDevice, count: int, ranks: int, stages: int
) -> Size:
    """Return how a division would do on `count` devices."""
    settings, workers = subject.settings, count // (ranks * stages)
    parts = stages_of(len(subject.keeps), stages)
    weights = [math.ceil(subject.weights.part(ranks, subject.kv_heads, part)) for part in parts]
    activations = _activation_bytes(subject, device, ranks)
    needs = [_need(subject, device, ranks, part) for part in parts]
    size = Size(
        ranks,
        stages,
        workers,
        max(weights),
        activations,
        max(need.block_bytes for need in needs) // settings.block_size,
    )
    stores = []
    for need, taken in zip(needs, weights, strict=True):
        budget = _budget(settings, device, taken, activations)
        if budget.num_bytes <= 0:
            return replace(size, problem=f"weights take {_gib(taken)} of {_gib(device.num_bytes)}")
        try:
            stores.append(size_store(need, settings, partial(replace, budget)))
        except ConfigError as error:
            return replace(size, problem=error.message)
    return _with_store(
        subject, device, size, needs, StoreSize(*map(min, zip(*stores, strict=True)))
    )


def _with_store(
    subject: PlannedModel, device: PlannedDevice, size: Size, needs: list[Need], store: StoreSize
) -> Size:
    longest = min(need.longest_in(store.num_blocks) for need in needs)
    blocks, num_rows = store.num_blocks - 1, subject.settings.num_rows
    streams = min(num_rows, blocks // max(1, needs[0].groups.needed(longest)))
    tokens = blocks * subject.settings.block_size
    found = replace(
        size,
        kv_bytes=max(store.num_blocks * need.block_bytes for need in needs),
        kv_tokens=tokens,
        full_length_streams=streams,
        max_model_len=longest,
    )
    typical = min(num_rows, blocks // max(1, needs[0].groups.needed(min(subject.tokens, longest))))
    return replace(found, speeds=_speeds(subject, device, found, max(1, typical), store))


def _need(subject: PlannedModel, device: PlannedDevice, ranks: int, layers: range) -> Need:
    keeps, whole = subject.keeps_of(ranks, layers), window_groups(subject.keeps)
    is_whole = len(keeps) == len(subject.keeps)
    return need_of(
        keeps,
        whole if is_whole else stage_groups(keeps, whole.windows),
        subject.settings,
        subject.weights.dtype,
        subject.max_model_len,
        can_save=not device.is_gpu,
        may_be_shorter=subject.may_be_shorter,
        page_dtype=subject.page_dtype,
    )


def _budget(
    settings: WorkerSettings, device: PlannedDevice, weights: int, activations: int
) -> MemoryBudget:
    if not device.is_gpu:
        left = device.num_bytes - weights - activations - settings.host_tier_bytes
        return host_budget(left, settings.cpu_memory_utilization)
    share = settings.gpu_memory_utilization
    left = int(share * device.num_bytes) - weights - activations - _CONTEXT_BYTES
    account = f"{share:g} of {_gib(device.num_bytes)}, less weights of {_gib(weights)}"
    return MemoryBudget(left, "gpu_memory_utilization", account, share, device.num_bytes)


def _activation_bytes(subject: PlannedModel, device: PlannedDevice, ranks: int) -> int:
    """Return the bytes of the largest step: hidden states, what an MLP has between its products,
    and logits."""
    settings = subject.settings
    width = 6 * subject.hidden_size + 3 * subject.inner_size // ranks
    of_tokens = settings.max_num_batched_tokens * width * subject.weights.dtype.itemsize
    # float32, and what a sampler sorts
    of_logits = settings.num_rows * subject.vocab_size * 4 * (3 if device.is_gpu else 1)
    return of_tokens + of_logits


def _speeds(
    subject: PlannedModel, device: PlannedDevice, size: Size, streams: int, store: StoreSize
) -> Speeds:
    """By the cost model of a simulated worker, whose settings come from the device's speeds.

    A pipeline has as many steps in flight as stages, each with its share of the streams; a token
    takes one step of each stage.
    """
    ranks, stages = size.tensor_parallel_size, size.pipeline_parallel_size
    part = max(
        stages_of(len(subject.keeps), stages),
        key=lambda each: subject.weights.part(ranks, subject.kv_heads, each),
    )
    lane = max(1, streams // stages)
    timing = _timing(subject, device, size, part, lane)
    alone = _timing(subject, device, size, part, 1)
    hops = stages * _HOP_S if stages > 1 else 0.0

    def token_s(settings: WorkerSettings, rows: int) -> float:
        step = StepPlan(step=0, decodes=list(range(rows)))
        return stages * step_seconds(step, settings) + hops

    num_lanes = min(stages, streams)
    batch = subject.settings.max_num_batched_tokens
    prefill = StepPlan(step=0, scheduled=[ScheduledRow(0, 0, batch, [], samples=False)])
    return Speeds(
        step_ms=1e3 * token_s(alone, 1),
        tokens_per_s=size.workers * num_lanes * lane / token_s(timing, lane),
        streams=streams,
        prefill_tokens_per_s=size.workers * batch / step_seconds(prefill, alone),
        sim={
            "sim_step_s": stages * timing.sim_step_s + hops,
            "sim_seq_s": timing.sim_seq_s,
            "sim_prefill_tokens_per_s": timing.sim_prefill_tokens_per_s,
            "sim_num_blocks": store.num_blocks,
        },
    )


def _timing(
    subject: PlannedModel, device: PlannedDevice, size: Size, layers: range, rows: int
) -> WorkerSettings:
    """Return the settings of a simulated worker: how long a step of the slowest stage takes with so
    many rows."""
    ranks, weights = size.tensor_parallel_size, subject.weights
    read_s = 1 / (device.gb_per_s * 1e9 * _READ_SHARE)
    experts = sum(weights.layers[number].experts for number in layers) / ranks
    # every row has experts of its own
    used = 1 - (1 - subject.expert_share) ** rows if subject.expert_share < 1 else 1.0
    read = weights.part(ranks, subject.kv_heads, layers) - weights.embedding / ranks
    read += weights.embedding / ranks if not weights.head and layers.start == 0 else 0.0
    sums = 0.0 if ranks == 1 else (2 * len(layers) + 1) * device.sum_s * math.log2(ranks)
    step_s = _STEP_S + (read - (1 - used) * experts) * read_s + sums
    share = len(layers) / len(subject.keeps)
    active = weights.num_params - (1 - subject.expert_share) * weights.num_expert_params
    product_s = 2 * active * share / ranks / (device.tflops * 1e12 * _PRODUCT_SHARE)
    if ranks > 1:
        sent = (
            2 * len(layers) * subject.hidden_size * weights.dtype.itemsize * 2 * (ranks - 1) / ranks
        )
        product_s += sent / (device.link_gb_per_s * 1e9)
    return WorkerSettings(
        sim_step_s=step_s,
        sim_seq_s=subject.tokens * size.kv_token_bytes * read_s,
        sim_prefill_tokens_per_s=1 / product_s,
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
