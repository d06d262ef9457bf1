"""NixlTransport: images by NIXL, which takes RDMA where UCX finds it.

NIXL knows neither leases nor deadlines: a source is asked before each read whether it may be read,
and a read that is late ends this process, since nothing else keeps it from writing later on.
"""

import importlib
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
from tokenmesh.shared.ids import new_token

logger = logging.getLogger(__name__)

_MODULES: Final = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_BATCH: Final = 512
_POLL_S: Final = 0.0002
_MOST_PEERS: Final = 64
"""Agents of others that stay known."""

Place = tuple[str, int, bytes, int]
"""Where to ask, the agent's metadata, and where its arena begins."""
_decode: Final = msgspec.msgpack.Decoder(Place).decode


class NixlTransport:
    def __init__(self, arena: MappedArena, leases: ServedLeases, host: str) -> None:
        """host: where the source is asked; NIXL chooses its own addresses."""
        self._arena = arena
        self._leases = leases
        self._host = host
        self._agent: Any = None
        self._first = 0
        """Where the arena begins."""
        self._lock = threading.Lock()
        """Held during calls of the agent, which are short."""
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        """Names of agents by metadata."""

    def listen(self) -> bytes:
        api = _library()
        name = f"tokenmesh-{new_token().hex()}"
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
        self._first = self._arena.address()
        self._agent.register_memory([(self._first, self._arena.view.nbytes, 0, "")], "DRAM")
        port = listen_for_questions(self._host, self._arena, self._leases)
        metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode((self._host, port, metadata, self._first))

    def read(
        self,
        address: bytes,
        ask: SlotsAsked,
        slots: Sequence[int],
        deadline_s: float,
        landed: Callable[[int], None],
    ) -> None:
        try:
            host, port, metadata, first = _decode(address)
        except msgspec.DecodeError as error:
            raise Unreachable(str(error)) from error
        ask_for(host, port, ask, deadline_s)
        peer = self._peer(metadata)
        for begin in range(0, len(slots), _BATCH):
            here, there = slots[begin : begin + _BATCH], ask.slots[begin : begin + _BATCH]
            try:
                self._copy(
                    peer, self._places(first, there), self._places(self._first, here), deadline_s
                )
            except ConnectionError:
                self._forget(metadata)
                raise
            for number in range(begin, begin + len(here)):
                landed(number)

    def _places(self, first: int, slots: Sequence[int]) -> list[tuple[int, int, int]]:
        size = self._arena.image_bytes
        return [(first + slot * size, size, 0) for slot in slots]

    def _copy(
        self,
        peer: str,
        there: list[tuple[int, int, int]],
        here: list[tuple[int, int, int]],
        deadline_s: float,
    ) -> None:
        """Raises ConnectionError; ends the process at the deadline."""
        agent, pause = self._agent, threading.Event()
        try:
            with self._lock:
                to, of = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
                handle = agent.initialize_xfer("READ", to, of, peer, b"")
                state = agent.transfer(handle)
            while state == "PROC":
                if monotonic_s() > deadline_s:
                    logger.error("NIXL does not end a read: the transfer process ends")
                    os._exit(STUCK)
                pause.wait(_POLL_S)
                with self._lock:
                    state = agent.check_xfer_state(handle)
            with self._lock:
                agent.release_xfer_handle(handle)
        # the library has a class for each of its errors
        except Exception as error:
            raise ConnectionError(f"NIXL: {error}") from error
        if state != "DONE":
            raise ConnectionError(f"NIXL ends a read with {state}")

    def _peer(self, metadata: bytes) -> str:
        with self._lock:
            name = self._peers.get(metadata)
            if name is None:
                try:
                    found = self._agent.add_remote_agent(metadata)
                except Exception as error:
                    raise Unreachable(f"NIXL: {error}") from error
                name = self._peers[metadata] = found.decode() if isinstance(found, bytes) else found
            self._peers.move_to_end(metadata)
            if len(self._peers) > _MOST_PEERS:
                self._peers.popitem(last=False)
            return name

    def _forget(self, metadata: bytes) -> None:
        with self._lock:
            self._peers.pop(metadata, None)


def _library() -> Any:
    """Import NIXL's interface. Raises MissingLibrary."""
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise MissingLibrary(f"nixl, which cannot be imported: {error}") from error
    raise MissingLibrary("nixl, which is not installed: pip install nixl-cu12")
