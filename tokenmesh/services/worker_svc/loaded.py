"""Loaded: what the worker must know about its model, whichever engine runs it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

from tokenmesh.engine.adapters.adapter import AdapterSource, SimAdapters
from tokenmesh.engine.core.sim import SimRunner, SimVocabulary
from tokenmesh.engine.exec.kv_bytes import NO_BYTES, KvBytes
from tokenmesh.engine.kv.shared_arena import SharedArena, SharedKv
from tokenmesh.engine.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.models.pooling.kind import (
    pools,
    read_pooling,
    stated_length,
    text_part,
)
from tokenmesh.engine.models.raw_config import read_config
from tokenmesh.engine.models.token_ids import read_eos
from tokenmesh.engine.runner import NO_IMAGES, HostImages, Runner
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.log_fields import PROGRESS

logger = logging.getLogger(__name__)

_ASSUMED_MODEL_LEN: Final = 4096
"""For a simulated model whose config.json has no length."""
_GIB: Final = 1 << 30
SIM_IMAGE_BYTES: Final = 4096


class ResidentMemory(Protocol):
    """It holds what of a model is in memory. `runner.resident.TorchResident` is the one with
    weights."""

    @property
    def level(self) -> int:
        """0: all of it; else the level of sleep that is left."""

    def sleep(self, level: int) -> int:
        """Release memory, on the engine thread; bytes freed on the device."""

    def wake(self, tags: Collection[str]) -> None:
        """Allocate it again. Raises Unavailable and CheckpointError."""


class Trace(Protocol):
    """A recording of every thread of the process. `runner.trace.TorchTrace` is the real one."""

    def start(self) -> None:
        """Begin; blocks, for seconds the first time."""

    def write(self, path: Path) -> None:
        """End and write it; blocks. Raises OSError."""


class SimMemory:
    """Sleeps and wakes without memory. Implements `ResidentMemory`."""

    def __init__(self) -> None:
        self._asleep: dict[str, int] = {}
        """Level by tag."""

    @property
    def level(self) -> int:
        return max(self._asleep.values(), default=0)

    def sleep(self, level: int) -> int:
        self._asleep["kv_cache"] = 1
        if level == 2:
            self._asleep["weights"] = 2
        return 0

    def wake(self, tags: Collection[str]) -> None:
        for tag in tags:
            self._asleep.pop(tag, None)


class Loaded(Protocol):
    """A model that is ready to run. `runner.loaded_model.LoadedModel` is the one with weights."""

    @property
    def runner(self) -> Runner:
        """Return what the engine steps."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""

    @property
    def vocab_size(self) -> int:
        """Ids at or above it do not exist."""

    @property
    def hidden_size(self) -> int:
        """Width of a token's embedding."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a stream."""

    @property
    def media(self) -> MediaFacts:
        """Return what prompts may hold besides text."""

    @property
    def pooling(self) -> PoolingFacts | None:
        """Return what it answers Pools with; None: it generates text instead."""

    @property
    def encoder_states(self) -> int:
        """States of an encoder that every prompt attends to; 0: none."""

    @property
    def has_grammars(self) -> bool:
        """Return whether its sampler follows grammars."""

    @property
    def kv_bytes(self) -> KvBytes:
        """Sizes of what it keeps between steps; none for a simulated model."""

    @property
    def shared_kv(self) -> SharedKv | None:
        """Return what other workers must know of its KV; None: none is exchanged."""

    @property
    def resident(self) -> ResidentMemory: ...

    @property
    def make_trace(self) -> Callable[[], Trace] | None:
        """Makes a trace of what it does; None where nothing is computed."""

    @property
    def adapters(self) -> AdapterSource:
        """Reads adapters for the model."""

    @property
    def weight_format(self) -> str:
        """Return how its weights are kept, as metrics and traces name it; empty: it has none."""

    @property
    def rope_boundary(self) -> int | None: ...

    @property
    def num_ranks(self) -> int:
        """Processes that compute it together."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline that these processes are."""

    def wait_seconds(self, rank: int) -> float:
        """Seconds that a rank has waited for other stages."""

    def sum_seconds(self, rank: int) -> float:
        """Seconds that a rank has spent in sums with the others."""

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        """The prefix cache's salt of a request: the client's own and the model's reasons."""


@dataclass(frozen=True, slots=True)
class SimModel:
    """A simulated model: sizes of a real one, no weights. Implements `Loaded`."""

    runner: SimRunner
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    adapters: SimAdapters = field(default_factory=lambda: SimAdapters(LoraSettings()))
    hidden_size: int = 0
    media: MediaFacts = TEXT_ONLY
    encoder_states: int = 0
    has_grammars: bool = False
    kv_bytes: KvBytes = NO_BYTES
    resident: SimMemory = field(default_factory=SimMemory)
    make_trace: None = None
    rope_boundary: None = None
    weight_format: str = "simulated"
    num_ranks: int = 1
    num_stages: int = 1
    shared_kv: SharedKv | None = None
    pooling: PoolingFacts | None = None

    def sum_seconds(self, _rank: int) -> float:
        return 0.0

    def wait_seconds(self, _rank: int) -> float:
        return 0.0

    def cache_salt(self, salt: str | None, _num_prompt: int) -> str | None:
        return salt


async def load(model: ModelSettings, worker: WorkerSettings) -> Loaded:
    """Load off the event loop. Raises CheckpointError or ConfigError."""
    if worker.engine == "sim":
        return await asyncio.to_thread(load_sim, model, worker)
    return await asyncio.to_thread(_load_torch, model, worker)


def load_sim(model: ModelSettings, worker: WorkerSettings) -> SimModel:
    """Read the sizes from config.json. Raises CheckpointError."""
    if worker.tensor_parallel_size > 1:
        logger.warning("tensor_parallel_size is ignored: a simulated model has one rank")
    directory = locate(model)
    raw = read_config(directory)
    text = text_part(raw)
    vocab_size = text.integer("vocab_size")
    eos_ids = read_eos(raw, directory, model, vocab_size)
    vocabulary = SimVocabulary(vocab_size, tuple(sorted(eos_ids)))
    facts = read_pooling(model, raw, directory) if pools(model, raw, directory) else None
    sizes = (facts.size, len(facts.labels)) if facts is not None else (0, 0)
    shared = None if facts is not None else _sim_kv(directory, worker)
    images = NO_IMAGES if shared is None else HostImages(shared.arena.num_slots, SIM_IMAGE_BYTES)
    runner = SimRunner(vocabulary, worker, threading.Event().wait, *sizes, images=images)
    longest = text.integer("max_position_embeddings", _ASSUMED_MODEL_LEN)
    if facts is not None:
        longest = stated_length(model, longest, directory)
    room = (runner.num_blocks - 1) * worker.block_size
    return SimModel(
        runner=runner,
        max_model_len=min(model.stated_len or longest, room),
        vocab_size=vocab_size,
        eos_token_ids=eos_ids,
        pooling=facts,
        adapters=SimAdapters(worker.lora),
        shared_kv=shared,
    )


def _sim_kv(directory: Path, worker: WorkerSettings) -> SharedKv | None:
    """Its images are all alike: tokens of a simulated model do not depend on them."""
    if not worker.kv.is_used:
        return None
    arena = SharedArena(max(1, worker.host_tier_bytes // SIM_IMAGE_BYTES), SIM_IMAGE_BYTES)
    config = (directory / "config.json").read_bytes()
    scope = blake2b(config + bytes([worker.block_size % 256]), digest_size=16).digest()
    return SharedKv(arena, scope, -(-SIM_IMAGE_BYTES // worker.block_size), worker.block_size)


def _load_torch(model: ModelSettings, worker: WorkerSettings) -> Loaded:
    # imported here, so that a simulated worker starts without torch
    from tokenmesh.engine.exec.build_any import build

    return build(model, worker, LoadProgress())


class LoadProgress:
    """Logs bytes and seconds each time that another tenth of the weights is there."""

    def __init__(self) -> None:
        self._began_s = monotonic_s()
        self._tenths = -1

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` bytes are read."""
        share = done / max(1, total)
        if int(10 * share) > self._tenths:
            self._tenths = int(10 * share)
            logger.info(
                "weights %d %%: %.2f of %.2f GiB in %.1f s",
                int(100 * share),
                done / _GIB,
                total / _GIB,
                monotonic_s() - self._began_s,
                extra={PROGRESS: share},
            )
