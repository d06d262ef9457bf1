"""TorchResident: what of a model is in memory now. Puts it to sleep and wakes it, part by part.

Tensors that somebody may refer to stay the same objects: their memory is given up and filled again
in place. Called on the engine thread while no step is in flight.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Final, Literal

import torch

from tokenmesh.services.worker_svc.models.native.decoder import Decoder
from tokenmesh.services.worker_svc.runner.cuda.runner import CudaRunner
from tokenmesh.services.worker_svc.runner.host_pages import give_back
from tokenmesh.services.worker_svc.runner.profile_run import AnyRunner
from tokenmesh.shared.errors import Unavailable

_OUT_OF_MEMORY: Final = ("can't allocate memory", "out of memory")
"""What torch says of a host's memory and of a GPU's."""

_Weights = Literal["here", "aside", "dropped"]


class TorchResident:
    """The weights and the KV pool of one runner.

    Level 1: the pool is freed, and the weights of a GPU wait in host memory. Level 2: the weights
    are freed as well and read from the checkpoint again. KV is gone at either level.
    """

    def __init__(
        self,
        runner: AnyRunner,
        decoder: Decoder,
        pool: torch.Tensor,
        load_decoder: Callable[[], Decoder],
    ) -> None:
        self._runner = runner
        self._decoder: Decoder | None = decoder
        self._pool = pool
        self._has_pool = True
        self._load_decoder = load_decoder
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
        elif self._weights == "here" and self._pool.device.type != "cpu":
            with _told_of_memory("put the weights aside"):
                freed += self._put_weights_aside()
        if self._pool.device.type == "cuda":
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

    def _drop_pool(self) -> int:
        freed = self._pool.nbytes
        if self._pool.device.type == "cpu":
            give_back(self._pool)
        else:
            self._pool.untyped_storage().resize_(0)
        self._has_pool = False
        return freed

    def _drop_weights(self) -> int:
        freed = 0 if self._weights == "aside" or self._decoder is None else _size(self._decoder)
        self._runner.drop_decoder()
        self._decoder = None
        self._aside.clear()
        self._weights = "dropped"
        return freed

    def _put_weights_aside(self) -> int:
        assert self._decoder is not None
        self._aside = put_aside(self._decoder)
        self._weights = "aside"
        return sum(host.nbytes for _, host in self._aside)

    def _wake_weights(self) -> None:
        if self._weights == "dropped":
            decoder = self._load_decoder()
            self._runner.take_decoder(decoder)
            self._decoder = decoder
        bring_back(self._aside)
        self._weights = "here"

    @torch.inference_mode()
    def _wake_pool(self) -> None:
        if self._pool.device.type != "cpu":
            self._pool.untyped_storage().resize_(self._pool.nbytes)
        self._pool[:, :, 0] = 0
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


def tensors_of(part: object) -> Iterator[torch.Tensor]:
    """Every tensor that a structure of dataclasses and sequences is made of."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from tensors_of(each)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))


def _size(decoder: Decoder) -> int:
    by_id = {id(tensor): tensor for tensor in tensors_of(decoder)}
    return sum(tensor.numel() * tensor.itemsize for tensor in by_id.values())
