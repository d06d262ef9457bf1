"""MooncakeTransport: images by Mooncake's transfer engine, over RDMA where there are devices.

Mooncake knows neither leases nor peers: a source is asked before each read whether it may be read.
A read that fails or is late ends this process, since nothing says that it writes no more.
"""

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmesh.services.worker_svc.kv.leases import ServedLeases
from tokenmesh.services.worker_svc.kv.transports.transport import (
    STUCK,
    MappedArena,
    MissingLibrary,
    SlotsAsked,
    Unreachable,
    ask_for,
    listen_for_questions,
)
from tokenmesh.shared.clock import monotonic_s

logger = logging.getLogger(__name__)

_BATCH: Final = 512
"""More than about a thousand at a time are rejected, and partly copied."""
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")

Place = tuple[str, int, str, int]
"""Host and port where it is asked, the engine's name, and where its arena begins."""
_decode: Final = msgspec.msgpack.Decoder(Place).decode


class MooncakeTransport:
    def __init__(self, arena: MappedArena, leases: ServedLeases, host: str) -> None:
        """host: an address that peers reach; Mooncake listens on all of them."""
        self._arena = arena
        self._leases = leases
        self._host = host
        self._engine: Any = None
        self._first = 0
        """Address at which the arena begins."""

    def listen(self) -> bytes:
        engine = _library().TransferEngine()
        has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
        protocol = "rdma" if has_rdma else "tcp"
        if engine.initialize(self._host, "P2PHANDSHAKE", protocol, ""):
            raise OSError(f"Mooncake does not start at {self._host} by {protocol}")
        self._first = self._arena.address()
        if engine.register_memory(self._first, self._arena.view.nbytes):
            raise OSError("Mooncake does not take the memory of the host tier")
        self._engine = engine
        port = listen_for_questions(self._host, self._arena, self._leases)
        name = f"{self._host}:{engine.get_rpc_port()}"
        return msgspec.msgpack.encode((self._host, port, name, self._first))

    def read(
        self,
        address: bytes,
        ask: SlotsAsked,
        slots: Sequence[int],
        deadline_s: float,
        landed: Callable[[int], None],
    ) -> None:
        try:
            host, port, name, first = _decode(address)
        except msgspec.DecodeError as error:
            raise Unreachable(str(error)) from error
        ask_for(host, port, ask, deadline_s)
        size = self._arena.image_bytes
        for begin in range(0, len(slots), _BATCH):
            if monotonic_s() > deadline_s:
                raise TimeoutError
            here, there = slots[begin : begin + _BATCH], ask.slots[begin : begin + _BATCH]
            code = self._engine.batch_transfer_sync_read(
                name,
                [self._first + slot * size for slot in here],
                [first + slot * size for slot in there],
                [size] * len(here),
            )
            if code:
                logger.error("Mooncake ends a read with %s: the transfer process ends", code)
                os._exit(STUCK)
            for number in range(begin, begin + len(here)):
                landed(number)


def _library() -> Any:
    """Import Mooncake's engine. Raises MissingLibrary."""
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        what = "mooncake, which is not installed: pip install mooncake-transfer-engine-non-cuda"
        raise MissingLibrary(what) from error
    except ImportError as error:
        what = f"mooncake, which cannot be imported: {error}; Debian's libibverbs1 has libibverbs"
        raise MissingLibrary(what) from error
