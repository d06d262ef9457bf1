"""PlacementIndex: one script call finds prefixes, compares the workers and reserves on the best."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final, NamedTuple

import msgspec

from tokenmesh.services.scheduler_svc.placement import TIE_SHARE
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.prefix_index import IndexKeys, with_shared
from tokenmesh.shared.redis import Part, Redis, Reply

_SOURCE: Final = with_shared(files(__package__).joinpath("place.lua").read_text(encoding="utf-8"))
_MAX_NAMES: Final = 4096
_MAX_PROMPTS: Final = 4096
_HASH_BYTES: Final = 8
_NUM_NAMES: Final = 2
"""Fields of CandidateLoad before its numbers."""
TAKES: Final = 1
"""Uses of a worker: it takes streams,"""
HOLDS: Final = 2
"""others may read what it has,"""
TAKES_AND_HOLDS: Final = 3
COMPUTES: Final = 4
"""or it computes for others, who may read what it has."""
LEAST_GAIN_S: Final = 0.005
"""KV of another worker is fetched where that is faster by so much."""


class CandidateLoad(NamedTuple):
    """A worker's last heartbeat; the numbers after its names are in the script's order."""

    worker_id: WorkerId
    epoch: int
    prefill_tokens_per_s: float
    queued_tokens: int
    extra_s: float
    """Seconds on top of prefill: KV pressure, the step in progress."""
    num_started: int
    """Streams past their first token."""
    num_starting: int
    """Streams before their first token."""
    num_room: int
    """Streams that it may hold."""
    is_indexed: bool
    """True where it writes to the index. If not, it never releases reservations."""
    kv_tokens_per_s: float = 0.0
    """It reads KV of others this fast."""
    kv_number: int = 0
    """Workers with equal KV share it; 0: none is exchanged."""
    use: int = TAKES
    weight: float = 0.0
    """A second of its own computing weighs so much where streams wait for it; 0: the usual."""


class CandidateScore(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The script's result for a worker."""

    matched_blocks: int
    reserved_tokens: int
    reserved_streams: int
    estimated_ttft_s: float
    has_room: bool
    cost_s: float
    """The estimate, plus the delay that computing causes other requests; the least is best."""
    source: int = 0
    """The candidate that its KV comes from, from 1; negative: which computes it; 0: none."""


class _Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    chosen: int
    """From 1; 0: no worker has room."""
    scores: list[CandidateScore]


_decode: Final = msgspec.msgpack.Decoder(_Answer).decode


class DepthPredictions:
    """The number of blocks that most workers hold of a prompt, from the last one that began alike.

    A wrong prediction costs the script two queries, a right one saves ten.
    """

    def __init__(self) -> None:
        self._depths: dict[bytes, int] = {}
        """By a prompt's first hash."""

    def of(self, route_hashes: bytes) -> int:
        """Blocks; 0 if unknown."""
        return self._depths.get(route_hashes[:_HASH_BYTES], 0)

    def record(self, route_hashes: bytes, depths: Sequence[int]) -> None:
        """Store the median of the blocks that the workers were found to hold."""
        first, depth = route_hashes[:_HASH_BYTES], sorted(depths)[len(depths) // 2]
        if depth:
            if first not in self._depths and len(self._depths) >= _MAX_PROMPTS:
                del self._depths[next(iter(self._depths))]
            self._depths[first] = depth
        else:
            self._depths.pop(first, None)


class PlacementIndex:
    """Any number of schedulers share the state in Redis; this process keeps only predictions."""

    def __init__(
        self,
        redis: Redis,
        block_tokens: int,
        settings: SchedulerSettings,
        index_settings: PrefixIndexSettings,
    ) -> None:
        """`block_tokens`: tokens of a route block."""
        self.redis = redis
        self.block_tokens = block_tokens
        self._script = redis.script(_SOURCE)
        self._settings = settings
        self._ttl_ms = max(1, round(index_settings.ttl_s * 1000))
        self._predictions = DepthPredictions()

    async def place(
        self, request: Place, candidates: Sequence[CandidateLoad], reservation: str
    ) -> tuple[int | None, list[CandidateScore]]:
        """The index of the candidate that was reserved on (None: no room), and all scores.

        `reservation` is a new name among the worker's reservations. Raises Unavailable when Redis
        is unreachable.
        """
        reserved: list[str] = []
        blocks: list[str] = []
        numbers: list[float] = [
            request.num_tokens,
            self.block_tokens,
            request.num_streams,
            self._ttl_ms,
            TIE_SHARE,
            self._settings.tie_s,
            self._settings.uncached_weight - 1.0,
            self._predictions.of(request.route_hashes),
            LEAST_GAIN_S,
        ]
        for each in candidates:
            name, held = _names(request.model, each.worker_id, each.epoch)
            reserved.append(name)
            blocks.append(held)
            numbers += each[_NUM_NAMES:]
        names = reserved + blocks
        arguments: list[Part] = [
            request.route_hashes,
            struct.pack(f"<{len(numbers)}d", *numbers),
            reservation,
        ]
        if request.reservation:
            held, before = IndexKeys(request.model).reserved_by(request.reservation)
            names.append(held)
            arguments.append(before)
        answer = _read(await self._script(names, arguments), len(candidates))
        depths = [score.matched_blocks for score in answer.scores]
        self._predictions.record(request.route_hashes, depths)
        return answer.chosen - 1 if answer.chosen else None, answer.scores


@lru_cache(maxsize=_MAX_NAMES)
def _names(model: ModelName, worker_id: WorkerId, epoch: int) -> tuple[str, str]:
    """Keys of a worker's reservations and of its blocks; cached, as each request needs them."""
    keys = IndexKeys(model)
    return keys.reserved(worker_id, epoch), keys.blocks(worker_id, epoch)


def _read(reply: Reply, num_candidates: int) -> _Answer:
    try:
        answer = _decode(reply if isinstance(reply, bytes) else b"")
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the placement script's answer has a wrong shape: {error}") from error
    highest = max(answer.chosen, *(abs(score.source) for score in answer.scores))
    if len(answer.scores) != num_candidates or highest > num_candidates:
        raise ProtocolError("the placement script's answer has a wrong number of workers")
    return answer
