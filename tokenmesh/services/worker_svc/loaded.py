"""Loaded: what the worker must know about its model, whichever engine runs it."""

import asyncio
import logging
import threading
from dataclasses import dataclass
from typing import Final, Protocol

from tokenmesh.services.worker_svc.engine.runner import Runner
from tokenmesh.services.worker_svc.engine.sim import SimRunner, SimVocabulary
from tokenmesh.services.worker_svc.models.location import locate
from tokenmesh.services.worker_svc.models.raw_config import read_json
from tokenmesh.services.worker_svc.models.read_eos import read_eos
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

logger = logging.getLogger(__name__)

_ASSUMED_MODEL_LEN: Final = 4096
"""For a simulated model whose config.json does not tell."""


class Loaded(Protocol):
    """A model that is ready to run. `runner.build.LoadedModel` is the one with weights."""

    @property
    def runner(self) -> Runner:
        """What the engine steps."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, tokens."""

    @property
    def vocab_size(self) -> int:
        """Ids at or above it do not exist."""

    @property
    def hidden_size(self) -> int:
        """Width of a media embedding."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a stream."""

    @property
    def takes_images(self) -> bool:
        """Whether prompts may hold media."""

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        """The prefix cache's salt of a request: the client's own and the model's reasons."""


@dataclass(frozen=True, slots=True)
class SimModel:
    """A simulated model: sizes of a real one, no weights. Implements `Loaded`."""

    runner: SimRunner
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    hidden_size: int = 0
    takes_images: bool = False

    def cache_salt(self, salt: str | None, _num_prompt: int) -> str | None:
        """The client's own."""
        return salt


async def load(model: ModelSettings, worker: WorkerSettings) -> Loaded:
    """Load off the event loop. Raises CheckpointError or ConfigError."""
    if worker.engine == "sim":
        return await asyncio.to_thread(load_sim, model, worker)
    return await asyncio.to_thread(_load_torch, model, worker)


def load_sim(model: ModelSettings, worker: WorkerSettings) -> SimModel:
    """Read the sizes from config.json. Raises CheckpointError."""
    directory = locate(model.model, model.revision)
    raw = read_json(directory / "config.json")
    text = raw.part("text_config") or raw
    vocab_size = text.integer("vocab_size")
    eos_ids = frozenset(eos for eos in read_eos(raw, directory) if eos < vocab_size)
    vocabulary = SimVocabulary(vocab_size, tuple(sorted(eos_ids)))
    runner = SimRunner(vocabulary, worker, threading.Event().wait)
    longest = text.integer("max_position_embeddings", _ASSUMED_MODEL_LEN)
    room = (runner.num_blocks - 1) * worker.block_size
    return SimModel(
        runner=runner,
        max_model_len=min(model.max_model_len or longest, room),
        vocab_size=vocab_size,
        eos_token_ids=eos_ids,
    )


def _load_torch(model: ModelSettings, worker: WorkerSettings) -> Loaded:
    # imported here, so that a simulated worker starts without torch
    from tokenmesh.services.worker_svc.runner.build import build_runner

    return build_runner(model, worker, _log_progress)


def _log_progress(done: int, total: int) -> None:
    tenth = 10 * done // total
    if tenth > 10 * (done - 1) // total:
        logger.info("loaded %d of %d layers", done, total)
