"""Define how the ranks of a group find each other: a store of torch.distributed, a link, a process
group.

The link stands before anything is loaded, so that a rank that ends is noticed from then on.
"""

import logging
import platform
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version as installed
from typing import Any, Final

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from tokenmesh import __version__
from tokenmesh.engine.ranks.frames import (
    MAX_HELLO_BYTES,
    Failure,
    FrameKind,
    Hello,
    RankFrames,
    Start,
    pack_frame,
)
from tokenmesh.engine.ranks.link import End, FollowerLink, LeaderLink
from tokenmesh.engine.ranks.pipe import Pipe
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.environment import RankPlace
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError, Unavailable

_LOOPBACK: Final = "127.0.0.1"
_ADDRESS: Final = "tokenmesh/link"
"""The key of the store with the leader's address and its token."""
_HELLO_S: Final = 10.0
_LOOK_S: Final = 0.5
"""The leader looks this often whether the ranks that it has started still run."""
_NEVER: Final = timedelta(days=365)
"""A sum has no time-out of its own: the link ends processes whose peers are gone."""

logger = logging.getLogger(__name__)

Launch = Callable[[RankPlace], Callable[[], bool]]
"""Starts the rank of a place, as a process or, in tests, as a thread; says whether it has ended."""


@dataclass(frozen=True, slots=True)
class LeaderGroup:
    ranks: Ranks
    link: LeaderLink
    local_world: int
    """Ranks of this host."""


def lead_group(
    model: ModelSettings,
    worker: WorkerSettings,
    place: RankPlace | None,
    launch: Launch,
    end: End,
) -> LeaderGroup:
    """Form the group as its first rank; waits for all others, and tells them what to load.

    place: None where nothing has started the others: `launch` does then. Raises ConfigError for
    ranks of other versions, and Unavailable when not all of them appear in time.
    """
    world, wait_s = worker.num_ranks, worker.rank_start_s
    if place is not None and place.world != world:
        raise ConfigError(
            f"tensor_parallel_size is {worker.tensor_parallel_size} and pipeline_parallel_size "
            f"{worker.pipeline_parallel_size}, so there must be {world} ranks, and "
            f"{place.world} were started",
            param="worker.tensor_parallel_size",
        )
    host = _LOOPBACK if place is None else place.host
    store = _open_store(place, wait_s)
    with socket.create_server((host, 0), backlog=world) as listener:
        token = secrets.token_hex(16)
        port = listener.getsockname()[1]
        _keys(store, place).set(_ADDRESS, f"{host} {port} {token}")
        others = range(1, world) if place is None else ()
        places = (RankPlace(rank, world, rank, world, _LOOPBACK, store.port) for rank in others)
        ends = [launch(each) for each in places]
        peers = _accept(listener, world, token, wait_s, ends)
    local_world = world if place is None else place.local_world
    start = Start(model.model_dump_json().encode(), worker.model_dump_json().encode(), local_world)
    _send_all(peers, FrameKind.START, msgspec.msgpack.encode(start))
    link = LeaderLink(peers, worker.rank_silence_s, end)
    link.start()
    ranks = _ranks(_keys(store, place), 0, worker, host)
    logger.info("%d ranks have met at %s", world, host)
    return LeaderGroup(ranks, link, local_world)


@dataclass(frozen=True, slots=True)
class FollowerGroup:
    ranks: Ranks
    link: FollowerLink
    model: ModelSettings
    worker: WorkerSettings
    local_world: int


def join_group(place: RankPlace, wait_s: float, end: End) -> FollowerGroup:
    """Join the group as a rank that follows. Raises ConfigError when the leader refuses it."""
    store = TCPStore(
        place.host, place.port, None, False, timedelta(seconds=wait_s), wait_for_workers=False
    )
    host, port, token = _keys(store, place).get(_ADDRESS).decode().split()
    leader = socket.create_connection((host, int(port)), wait_s)
    leader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = Hello(token, place.rank, _versions())
    leader.sendall(pack_frame(FrameKind.HELLO, msgspec.msgpack.encode(hello)))
    start = _read_start(leader)
    leader.settimeout(None)
    worker = WorkerSettings.model_validate_json(start.worker)
    link = FollowerLink(leader, worker.rank_silence_s, end)
    link.start()
    return FollowerGroup(
        _ranks(_keys(store, place), place.rank, worker, leader.getsockname()[0]),
        link,
        ModelSettings.model_validate_json(start.model),
        worker,
        start.local_world,
    )


def _open_store(place: RankPlace | None, wait_s: float) -> TCPStore:
    """The leader serves it, unless torchrun does."""
    timeout = timedelta(seconds=wait_s)
    if place is None:
        return TCPStore(_LOOPBACK, 0, None, True, timeout, wait_for_workers=False)
    serves = not place.has_store
    return TCPStore(place.host, place.port, None, serves, timeout, wait_for_workers=False)


def _keys(store: Store, place: RankPlace | None) -> Store:
    """A store of this start: torchrun keeps its own over restarts."""
    return PrefixStore(f"tokenmesh/{0 if place is None else place.restarts}", store)


def _accept(
    listener: socket.socket,
    world: int,
    token: str,
    wait_s: float,
    ends: Sequence[Callable[[], bool]],
) -> dict[int, socket.socket]:
    """Connections of all other ranks, by rank."""
    peers: dict[int, socket.socket] = {}
    versions: dict[int, dict[str, str]] = {}
    deadline_s = monotonic_s() + wait_s
    while len(peers) < world - 1:
        left_s = deadline_s - monotonic_s()
        if left_s <= 0:
            missing = sorted(set(range(1, world)) - peers.keys())
            raise Unavailable(f"ranks {missing} of {world} have not appeared in {wait_s:g} s")
        if any(has_ended() for has_ended in ends):
            raise Unavailable("a rank has ended before it joined; see the log for its reason")
        listener.settimeout(min(left_s, _LOOK_S))
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            hello = _read_hello(connection, token)
            if hello is None or hello.rank in peers or not 0 < hello.rank < world:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[hello.rank], versions[hello.rank] = connection, hello.versions
    problem = _differences(versions)
    if problem:
        failure = msgspec.msgpack.encode(Failure(problem, is_config=True))
        _send_all(peers, FrameKind.FAILED, failure)
        raise ConfigError(problem)
    return peers


def _read_hello(connection: socket.socket, token: str) -> Hello | None:
    """None for one who does not know the token."""
    connection.settimeout(_HELLO_S)
    reader = RankFrames(connection, MAX_HELLO_BYTES)
    try:
        while not (frames := reader.read()):
            continue
        hello = msgspec.msgpack.decode(frames[0][1], type=Hello)
    except (EOFError, OSError, ValueError):
        return None
    connection.settimeout(None)
    return hello if secrets.compare_digest(hello.token, token) else None


def _read_start(leader: socket.socket) -> Start:
    reader = RankFrames(leader)
    try:
        while not (frames := reader.read()):
            continue
    except (EOFError, OSError) as error:
        raise Unavailable("the leader has ended before the group was complete") from error
    kind, payload = frames[0]
    if kind is FrameKind.FAILED:
        raise ConfigError(msgspec.msgpack.decode(payload, type=Failure).message)
    return msgspec.msgpack.decode(payload, type=Start)


def _send_all(peers: dict[int, socket.socket], kind: FrameKind, payload: bytes) -> None:
    for connection in peers.values():
        connection.sendall(pack_frame(kind, payload))


def _versions() -> dict[str, str]:
    """Return the versions of everything whose numbers have to be the same on all ranks."""
    return {
        "tokenmesh": __version__,
        "torch": str(torch.__version__),
        "transformers": installed("transformers"),
        "processor": platform.machine(),
    }


def _differences(versions: dict[int, dict[str, str]]) -> str:
    """Return what differs from this rank's, by rank; empty: nothing."""
    own = _versions()
    found = [
        f"rank {rank} has {name} {theirs.get(name)}, rank 0 has {own[name]}"
        for rank, theirs in sorted(versions.items())
        for name in own
        if theirs.get(name) != own[name]
    ]
    return "; ".join(found)


def _ranks(store: Store, number: int, worker: WorkerSettings, host: str) -> Ranks:
    """Meet the ranks of the same stage, then one of each other stage; `host`: the address at which
    others reach this rank."""
    world, stages = worker.tensor_parallel_size, worker.pipeline_parallel_size
    stage, rank = divmod(number, world)
    group = pipe = None
    if world > 1:
        group = _process_group(PrefixStore(f"stage/{stage}", store), rank, world, host)
    if stages > 1:
        pipe = _process_group(PrefixStore(f"pipe/{rank}", store), stage, stages, host)
    by_expert = worker.enable_expert_parallel
    spare = worker.eplb_config.num_redundant_experts if worker.enable_eplb else None
    return Ranks(rank, world, group, by_expert, spare, pipe=Pipe(stage, stages, pipe))


def _process_group(store: Store, rank: int, world: int, host: str) -> ProcessGroupGloo:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _NEVER
    # where the other ranks are, be it loopback: the host's name may stand for another network
    options._devices = [gloo.create_device(hostname=host)]
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, world, options)
