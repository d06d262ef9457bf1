"""build_runner: settings -> a loaded model that is ready for the engine."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tokenmesh.kernels.linear import can_pack
from tokenmesh.services.worker_svc.models.build_decoder import Progress, build_decoder
from tokenmesh.services.worker_svc.models.checkpoint import Checkpoint
from tokenmesh.services.worker_svc.models.config import RopeConfig
from tokenmesh.services.worker_svc.models.location import locate
from tokenmesh.services.worker_svc.models.raw_config import read_json
from tokenmesh.services.worker_svc.models.read_config import ModelFacts, read_facts
from tokenmesh.services.worker_svc.models.read_eos import read_eos
from tokenmesh.services.worker_svc.runner.memory import count_blocks, make_pool
from tokenmesh.services.worker_svc.runner.rows import Rows
from tokenmesh.services.worker_svc.runner.runner import TorchRunner
from tokenmesh.services.worker_svc.sampling.sampler import Sampler
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

SMALL_CHECKPOINT_BYTES: Final = 64 << 20
"""Below this, weights stay in the processor's caches and float32 is faster than bfloat16."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what the rest of the worker must know about it."""

    runner: TorchRunner
    architecture: str
    dtype: str
    """"float32" or "bfloat16"."""
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: frozenset[int]
    takes_images: bool
    rope: RopeConfig

    def cache_salt(self, salt: str | None, num_prompt: int) -> str | None:
        """The prefix cache's salt of a request: the client's own and the model's reasons."""
        scope = self.rope.scope(num_prompt)
        return salt if scope is None else f"{scope}: {salt or ''}"


def build_runner(model: ModelSettings, worker: WorkerSettings, progress: Progress) -> LoadedModel:
    """Load a checkpoint and allocate its KV pool; blocks.

    Sets the process's number of torch threads. Raises CheckpointError or ConfigError.
    """
    if worker.cpu_threads is not None:
        torch.set_num_threads(worker.cpu_threads)
    directory = locate(model.model, model.revision)
    raw = read_json(directory / "config.json")
    facts = read_facts(raw)
    checkpoint = Checkpoint(directory)
    dtype = choose_dtype(model, facts, directory)
    max_model_len = _max_model_len(model, facts)
    with torch.inference_mode():
        decoder = build_decoder(facts, checkpoint, dtype, progress)
        # the pool gets a share of what the weights have left
        num_blocks = count_blocks(facts.config, worker, dtype, max_model_len)
        pool = make_pool(facts.config, num_blocks, worker.block_size, dtype)
        max_blocks = -(-max_model_len // worker.block_size)
        rows = Rows(worker.max_num_seqs, max_blocks, decoder.config)
        eos_token_ids = read_eos(raw, directory)
        sampler = Sampler(decoder.config.vocab_size, eos_token_ids)
        runner = TorchRunner(decoder, pool, rows, sampler)
    logger.info("loaded %s in %s, %d KV blocks", directory, dtype, num_blocks)
    return LoadedModel(
        runner=runner,
        architecture=facts.architecture,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        vocab_size=facts.config.vocab_size,
        hidden_size=facts.config.hidden_size,
        eos_token_ids=eos_token_ids,
        takes_images=facts.takes_images,
        rope=facts.config.ropes[0],
    )


def choose_dtype(model: ModelSettings, facts: ModelFacts, directory: Path) -> torch.dtype:
    """What the settings say; with "auto" the checkpoint's own type where the CPU is good at it."""
    if model.dtype != "auto":
        return torch.float32 if model.dtype == "float32" else torch.bfloat16
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    is_half = facts.dtype in ("bfloat16", "float16")
    if is_half and size >= SMALL_CHECKPOINT_BYTES and can_pack(torch.bfloat16):
        return torch.bfloat16
    return torch.float32


def _max_model_len(model: ModelSettings, facts: ModelFacts) -> int:
    longest = facts.config.max_position
    if model.max_model_len is None:
        return longest
    if model.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {model.max_model_len}; {model.model} was made for {longest}",
            param="max_model_len",
        )
    return model.max_model_len
