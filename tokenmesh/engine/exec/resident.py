"""TorchResident: what of a model is in memory now. Puts it to sleep and wakes it, part by part.

Tensors that other objects may refer to stay the same objects: their memory is released and filled
again in place. Called on the engine thread while no step is in flight.
"""

import ctypes
import logging
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Final, Literal

import torch

from tokenmesh.engine.exec.cuda.runner import CudaRunner
from tokenmesh.engine.exec.drafter import Drafter, DraftModel
from tokenmesh.engine.exec.pool_runner import PoolRunner
from tokenmesh.engine.exec.profile_run import AnyRunner
from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.models.api import LanguageModel
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.pooling.api import PoolModel
from tokenmesh.shared.errors import Unavailable

logger = logging.getLogger(__name__)


def give_back(tensor: torch.Tensor) -> None:
    """Free what a contiguous CPU tensor occupies; it reads as zeros, and takes pages when written.

    Pointers to it stay valid. Pages that it shares with other data stay.
    """
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    first = -(-start // page) * page
    length = (start + tensor.nbytes) // page * page - first
    if length <= 0:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    where = (ctypes.c_void_p(first), ctypes.c_size_t(length))
    # the first is for memory that is mapped as shared, the second for all other
    if madvise(*where, mmap.MADV_REMOVE) and madvise(*where, mmap.MADV_DONTNEED):
        logger.warning("the system keeps %d bytes (errno %d)", length, ctypes.get_errno())


_OUT_OF_MEMORY: Final = ("can't allocate memory", "out of memory")
"""It holds what torch says of a host's memory and of a GPU's."""

_Weights = Literal["here", "aside", "dropped"]


class TorchResident:
    """The weights and the KV pool of one runner.

    Level 1: the pool is freed, and the weights of a GPU wait in host memory. Level 2: the weights
    are freed as well and read from the checkpoint again. KV is gone at either level.
    """

    def __init__(
        self,
        runner: AnyRunner | PoolRunner,
        model: LanguageModel | PoolModel,
        store: KvStore,
        load: Callable[[], Any],
    ) -> None:
        """load: the model again, of the same kind."""
        self._runner = runner
        self._model: Any = model
        """None while its weights are dropped."""
        self._store = store
        self._has_pool = True
        self._load = load
        self._weights: _Weights = "here"
        self._aside: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @property
    def level(self) -> int:
        """0: all is here; else the level that is left to be woken."""
        if self._weights == "dropped":
            return 2
        return 1 if self._weights == "aside" or not self._has_pool else 0

    def sleep(self, level: int) -> int:
        """Go to that level, or stay at a deeper one; bytes freed on the device.

        Raises Unavailable when the host has no room for a GPU's weights: they stay where they are.
        """
        freed = 0
        if isinstance(self._runner, CudaRunner):
            # they know where the weights and the pool are now
            self._runner.drop_graphs()
        if self._has_pool:
            freed += self._drop_pool()
        if level == 2 and self._weights != "dropped":
            freed += self._drop_weights()
        elif self._weights == "here" and self._store.device.type != "cpu":
            with _told_of_memory("put the weights aside"):
                freed += self._put_weights_aside()
        if self._store.device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def wake(self, tags: Collection[str]) -> None:
        """Bring back `weights`, `kv_cache`, or both; what is here already stays as it is.

        Raises Unavailable when memory does not suffice, CheckpointError when the checkpoint is
        gone; the part in question then stays asleep.
        """
        with _told_of_memory("wake up"):
            if "weights" in tags:
                self._wake_weights()
            if "kv_cache" in tags and not self._has_pool:
                self._wake_pool()
            if self.level == 0 and isinstance(self._runner, CudaRunner):
                self._runner.make_graphs(self._runner.graph_sizes)

    @property
    def _drafter(self) -> Drafter | None:
        return self._runner.drafter if isinstance(self._runner, TorchRunner) else None

    @property
    def _pool(self) -> list[torch.Tensor]:
        """All tensors of the pool, those of a drafter included."""
        drafter = self._drafter
        return self._store.tensors + ([] if drafter is None else drafter.store.tensors)

    def _drop_pool(self) -> int:
        for tensor in self._pool:
            if tensor.device.type == "cpu":
                give_back(tensor)
            else:
                tensor.untyped_storage().resize_(0)
        self._has_pool = False
        arena = self._runner.arena if isinstance(self._runner, TorchRunner) else None
        if arena is not None:
            give_back(arena)
        num_bytes = sum(tensor.nbytes for tensor in self._pool)
        return num_bytes + (0 if arena is None else arena.nbytes)

    def _drop_weights(self) -> int:
        freed = 0
        if self._weights != "aside" and self._model is not None:
            drafter = self._drafter
            # a head shares some weights with the model
            freed = _size(self._model, None if drafter is None else drafter.model)
        self._runner.drop_model()
        self._model = None
        self._aside.clear()
        self._weights = "dropped"
        return freed

    def _put_weights_aside(self) -> int:
        assert self._model is not None
        self._aside = put_aside(self._model)
        self._weights = "aside"
        return sum(host.nbytes for _, host in self._aside)

    def _wake_weights(self) -> None:
        if self._weights == "dropped":
            model = self._load()
            self._runner.take_model(model)
            self._model = model
        bring_back(self._aside)
        self._weights = "here"

    @torch.inference_mode()
    def _wake_pool(self) -> None:
        for tensor in self._pool:
            if tensor.device.type != "cpu":
                tensor.untyped_storage().resize_(tensor.nbytes)
        self._store.clear_blocks(torch.zeros(1, dtype=torch.int64, device=self._store.device))
        self._has_pool = True


@contextmanager
def _told_of_memory(what: str) -> Iterator[None]:
    """A lack of memory as an error that a client may see and retry."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise Unavailable(f"not enough memory to {what}: {error}") from error


def put_aside(weights: object) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Copy every weight to host memory and free it where it was; storages and their copies."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors_of(weights)
    }
    aside: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
    try:
        for storage in storages.values():
            is_gpu = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_gpu)
            host.untyped_storage().copy_(storage)
            storage.resize_(0)
            aside.append((storage, host))
    except RuntimeError:
        bring_back(aside)
        raise
    return aside


def bring_back(aside: list[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    """Undo `put_aside`; the list is empty afterwards, or holds what did not fit."""
    while aside:
        storage, host = aside[-1]
        storage.resize_(host.nbytes)
        storage.copy_(host.untyped_storage())
        aside.pop()


def tensors_of(part: object, _seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor that a structure of dataclasses, sequences and modules is made of.

    Without those that have a shape and no memory: what holds their weights now is there as well.
    """
    seen = set() if _seen is None else _seen
    if isinstance(part, torch.Tensor):
        if not part.is_meta:
            yield part
        return
    if id(part) in seen:
        return
    seen.add(id(part))
    parts: Iterable[object] = ()
    if isinstance(part, list | tuple):
        parts = part
    elif isinstance(part, torch.nn.Module):
        own = [v for v in vars(part).values() if is_dataclass(v) or isinstance(v, tuple)]
        parts = [*part.parameters(recurse=False), *part.buffers(recurse=False), *own]
        parts = [*parts, *part.children()]
    elif is_dataclass(part) and not isinstance(part, type):
        parts = [getattr(part, field.name) for field in fields(part)]
    for each in parts:
        yield from tensors_of(each, seen)


def _size(model: LanguageModel | PoolModel, draft: DraftModel | None) -> int:
    by_id = {id(tensor): tensor for tensor in tensors_of((model, draft))}
    return sum(tensor.numel() * tensor.itemsize for tensor in by_id.values())
