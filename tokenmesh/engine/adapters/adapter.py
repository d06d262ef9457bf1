"""ReadAdapter: an adapter in memory; and the one that a simulated engine reads."""

import hashlib
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.adapters.peft_config import WEIGHTS_FILE, read_config
from tokenmesh.shared.config.lora import LoraSettings
from tokenmesh.shared.errors import InvalidInput

HASH_CHARS: Final = 32
_READ_BYTES: Final = 1 << 20
_NICE: Final = 10


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter of one model."""

    matrices: AdapterMatrices
    content_hash: str
    """It is the hash of matrices and scalings; another content has another one."""
    rank: int
    """The largest of all layers."""
    base_model: str | None
    """It holds what it says it was trained on."""


class AdapterSource(Protocol):
    """Reads adapters for one model; called from any thread."""

    def read(self, directory: Path) -> ReadAdapter:
        """Blocks. Raises InvalidInput that names file and key."""


def lower_priority() -> None:
    """Let this thread have only a small share of processors that others want.

    Threads of a step wait for each other, so one that is held up holds up the step.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@dataclass(frozen=True, slots=True)
class SimMatrices:
    """It holds what a simulated engine draws by."""

    content_hash: str
    nbytes: int


class SimAdapters:
    """Reads sizes and a hash only; implements `AdapterSource`."""

    def __init__(self, settings: LoraSettings) -> None:
        self._settings = settings

    def read(self, directory: Path) -> ReadAdapter:
        config, path = read_config(directory), directory / WEIGHTS_FILE
        if config.rank > self._settings.max_lora_rank:
            limit = f"max_lora_rank allows {self._settings.max_lora_rank}"
            raise InvalidInput(
                f"{config.file.name}: r is {config.rank}; {limit}", param="lora_path"
            )
        digest, size = hashlib.sha256(repr((config.rank, config.alpha)).encode()), 0
        try:
            with path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    digest.update(data)
                    size += len(data)
        except OSError as error:
            what = f"{path.name}: cannot be read: {error.strerror}"
            raise InvalidInput(what, param="lora_path") from error
        content_hash = digest.hexdigest()[:HASH_CHARS]
        return ReadAdapter(
            SimMatrices(content_hash, size), content_hash, config.rank, config.base_model
        )
