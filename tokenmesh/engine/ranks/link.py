"""The connections between the leader of a group and its followers, and who is alive."""

import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.plan import StepPlan
from tokenmesh.engine.ranks.frames import (
    AdapterRead,
    Beat,
    Command,
    DropAdapters,
    Failure,
    FrameKind,
    HeadRead,
    RankDone,
    RankFrames,
    TakeAdapter,
    pack_frame,
)
from tokenmesh.engine.ranks.wire import decode_plan, encode_plan
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import Unavailable

BEAT_S: Final = 0.25
LOADING_SILENCE_S: Final = 60.0
"""Until a model is loaded: Python code that holds the interpreter for seconds runs then."""
_COMMAND_S: Final = 600.0
"""A command may read all weights again."""

logger = logging.getLogger(__name__)

End = Callable[[str, bool], None]
"""Ends the process: why, and whether its settings are the reason. In tests it may return."""

_encode: Final = msgspec.msgpack.encode
_command_decoder: Final = msgspec.msgpack.Decoder(Command)
_drawn_decoder: Final = msgspec.msgpack.Decoder(list[list[int]])


class _Silence:
    """Notices peers that send nothing. A process that stood still itself accuses none of them."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        now = self._looked_s = monotonic_s()
        self._heard_s = dict.fromkeys(peers, now)

    def hear(self, peer: int) -> None:
        self._heard_s[peer] = monotonic_s()

    def longest(self) -> tuple[int, float]:
        """The peer that has been silent for longest, and how long."""
        now = monotonic_s()
        lag = max(0.0, now - self._looked_s - BEAT_S)
        self._looked_s = now
        if lag:
            self._heard_s = {peer: min(now, at + lag) for peer, at in self._heard_s.items()}
        peer = min(self._heard_s, key=self._heard_s.__getitem__)
        return peer, now - self._heard_s[peer]


class Link:
    """It holds what both ends have in common: frames to all peers, beats, a watch over them."""

    def __init__(self, peers: Mapping[int, socket.socket], silence_s: float, end: End) -> None:
        self._peers = dict(peers)
        self._silence_s = silence_s
        self._end = end
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.is_loaded = False

    def start(self) -> None:
        for work, name in ((self._watch, "rank-watch"), (self._beat, "rank-beat")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def close(self) -> None:
        """End the group on purpose; followers end when they notice."""
        self._closed.set()
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def send(self, kind: FrameKind, payload: bytes) -> None:
        """To every peer. One that has ended is noticed by the watch."""
        frame = pack_frame(kind, payload)
        with self._lock:
            for connection in self._peers.values():
                try:
                    connection.sendall(frame)
                except OSError:
                    continue

    def fail(self, message: str, *, is_config: bool) -> None:
        """Say why this process is about to end."""
        self.send(FrameKind.FAILED, _encode(Failure(message, is_config)))

    def beat(self) -> Beat:
        """Return what the next beat says."""
        return Beat()

    def take(self, peer: int, kind: FrameKind, payload: bytes) -> None:
        """A frame has arrived."""
        raise NotImplementedError

    def ended(self) -> None:
        """The peers are gone and `end` has returned."""

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.send(FrameKind.BEAT, _encode(self.beat()))

    def _watch(self) -> None:
        try:
            reason, is_config = self._until_end()
        # a frame that cannot be read, such as one of another version
        except Exception as error:
            reason, is_config = f"cannot read a frame: {error!r}", False
        if not self._closed.is_set():
            self._end(reason, is_config)
        self.ended()

    def _until_end(self) -> tuple[str, bool]:
        """Take frames until a peer ends or is silent; why, and whether settings are the reason."""
        silence = _Silence(self._peers)
        readers = {rank: RankFrames(each) for rank, each in self._peers.items()}
        poll = select.poll()  # `select` takes no descriptor above 1,023
        try:
            ranks = {each.fileno(): rank for rank, each in self._peers.items()}
            for descriptor in ranks:
                poll.register(descriptor, select.POLLIN)
        except (OSError, ValueError):  # closed by this process
            return "the link is closed", False
        while not self._closed.is_set():
            for descriptor, _ in poll.poll(BEAT_S * 1000):
                rank = ranks[descriptor]
                try:
                    frames = readers[rank].read()
                except (EOFError, OSError):
                    return f"rank {rank} has ended", False
                silence.hear(rank)
                for kind, payload in frames:
                    if kind is FrameKind.FAILED:
                        failure = msgspec.msgpack.decode(payload, type=Failure)
                        return f"rank {rank}: {failure.message}", failure.is_config
                    self.take(rank, kind, payload)
            rank, silent_s = silence.longest()
            if silent_s > (self._silence_s if self.is_loaded else LOADING_SILENCE_S):
                return f"rank {rank} has been silent for {silent_s:.1f} s", False
        return "the link is closed", False


class LeaderLink(Link):
    """Sends plans, draws and commands to all followers."""

    def __init__(self, peers: Mapping[int, socket.socket], silence_s: float, end: End) -> None:
        super().__init__(peers, silence_s, end)
        self.beats: dict[int, Beat] = {rank: Beat() for rank in peers}
        """The last of each follower."""
        self._done: SimpleQueue[RankDone | None] = SimpleQueue()
        self.adapters: MutableMapping[AdapterMatrices, int] = WeakKeyDictionary()
        """The numbers by which plans name matrices that all ranks have."""
        self._read: SimpleQueue[tuple[int, AdapterRead] | None] = SimpleQueue()
        self._forgotten: deque[int] = deque()

    def send_plan(self, plan: StepPlan) -> None:
        self.send(FrameKind.PLAN, encode_plan(plan, self.adapters))

    def send_draws(self, token_ids: list[list[int]]) -> None:
        """Return what each row of a step drew, in the order of the step; nothing: it failed."""
        self.send(FrameKind.DRAWN, _encode(token_ids))

    def send_head_read(self, read: HeadRead) -> None:
        """Let all ranks compute their parts of what a head reads."""
        self.send(FrameKind.READ_BY_HEAD, _encode(read))

    def send_command(self, command: Command) -> None:
        """Let all followers do something; `wait_done` waits for them."""
        self.send(FrameKind.COMMAND, _encode(command))

    def wait_done(self) -> list[RankDone]:
        """One of each follower, in any order. Raises Unavailable when one has ended."""
        found = []
        for _ in self._peers:
            done = self._done.get(timeout=_COMMAND_S)
            if done is None:
                raise Unavailable("a rank has ended")
            found.append(done)
        return found

    def ask_for_adapter(self, number: int, directory: str) -> None:
        """Let all followers read an adapter; `wait_adapter` waits for them."""
        self.send_command(TakeAdapter(number, directory))

    def wait_adapter(self, number: int) -> dict[int, AdapterRead]:
        """The answers by rank. Raises Unavailable when one has ended, and when none comes."""
        found: dict[int, AdapterRead] = {}
        while len(found) < len(self._peers):
            try:
                answer = self._read.get(timeout=_COMMAND_S)
            except Empty:
                answer = None
            if answer is None:
                raise Unavailable("a rank has not read the adapter")
            rank, read = answer
            if read.number == number:  # others have been given up
                found[rank] = read
        return found

    def forget_adapter(self, number: int) -> None:
        """No plan will name it; followers hear of it with the next beat. Never blocks."""
        self._forgotten.append(number)

    def beat(self) -> Beat:
        numbers = []
        while self._forgotten:
            numbers.append(self._forgotten.popleft())
        if numbers:
            self.send_command(DropAdapters(numbers))
        return Beat()

    def take(self, peer: int, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.ADAPTER:
            self._read.put((peer, msgspec.msgpack.decode(payload, type=AdapterRead)))
        elif kind is FrameKind.DONE:
            self._done.put(msgspec.msgpack.decode(payload, type=RankDone))
        elif kind is FrameKind.BEAT:
            self.beats[peer] = msgspec.msgpack.decode(payload, type=Beat)

    def ended(self) -> None:
        self._done.put(None)
        self._read.put(None)


class FollowerLink(Link):
    """Takes plans, draws and commands of the leader, in their order."""

    def __init__(self, leader: socket.socket, silence_s: float, end: End) -> None:
        super().__init__({0: leader}, silence_s, end)
        # as many as the leader launches ahead of its own steps, which wait for this rank's sums
        self.work: SimpleQueue[StepPlan | Command | None] = SimpleQueue()
        """None: the leader has ended."""
        self.drawn: SimpleQueue[list[list[int]] | None] = SimpleQueue()
        self.adapters: SimpleQueue[TakeAdapter | None] = SimpleQueue()
        self.head_reads: SimpleQueue[HeadRead | None] = SimpleQueue()
        self.progress = Beat()

    def done(self, done: RankDone) -> None:
        """A command is carried out."""
        self.send(FrameKind.DONE, _encode(done))

    def adapter_read(self, read: AdapterRead) -> None:
        self.send(FrameKind.ADAPTER, _encode(read))

    def beat(self) -> Beat:
        return self.progress

    def take(self, peer: int, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.PLAN:
            self.work.put(decode_plan(payload))
        elif kind is FrameKind.DRAWN:
            self.drawn.put(_drawn_decoder.decode(payload))
        elif kind is FrameKind.READ_BY_HEAD:
            self.head_reads.put(msgspec.msgpack.decode(payload, type=HeadRead))
        elif kind is FrameKind.COMMAND:
            command = _command_decoder.decode(payload)
            if isinstance(command, TakeAdapter):
                self.adapters.put(command)  # read while steps run
            else:
                self.work.put(command)

    def ended(self) -> None:
        self.work.put(None)
        self.drawn.put(None)
        self.adapters.put(None)
        self.head_reads.put(None)
