"""PlacementIndex: one script call finds prefixes, weighs the workers and reserves on the best."""

import struct
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final, NamedTuple

import msgspec

from tokenmesh.services.scheduler_svc.index.guesses import Guesses
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.prefix_index import IndexKeys, with_shared
from tokenmesh.shared.redis import Part, Redis, Reply

_SOURCE: Final = with_shared(files(__package__).joinpath("place.lua").read_text(encoding="utf-8"))
_MAX_NAMES: Final = 4096
_FIRST_NUMBER: Final = 2
"""Of a Bid; its name comes before."""


class Bid(NamedTuple):
    """What a worker's last beat says; all after its name in the script's order."""

    worker_id: WorkerId
    epoch: int
    prefill_tokens_per_s: float
    queued_tokens: int
    extra_s: float
    """Seconds on top of prefill: KV pressure, a step, an adapter to load."""
    num_started: int
    """Streams past their first token."""
    num_starting: int
    """Streams before it."""
    num_room: int
    """Streams it may hold."""
    is_indexed: bool
    """Whether it writes to the index: else what is reserved on it is never given back."""


class Weighed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the script found out about a worker."""

    matched_blocks: int
    reserved_tokens: int
    reserved_streams: int
    estimated_ttft_s: float
    has_room: bool
    cost_s: float
    """The estimate, and what computing costs others; the least of it is best."""


class _Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    chosen: int
    """From 1; 0: nobody has room."""
    weighed: list[Weighed]


_decode: Final = msgspec.msgpack.Decoder(_Answer).decode


class PlacementIndex:
    """Any number of schedulers share what is in Redis; here there are but guesses."""

    def __init__(self, redis: Redis, block_tokens: int, ttl_s: float) -> None:
        """`ttl_s`: how long a worker's keys outlive its last heartbeat."""
        self.redis = redis
        self._script = redis.script(_SOURCE)
        self._guesses = Guesses()
        self.block_tokens = block_tokens
        self._ttl_ms = max(1, round(ttl_s * 1000))

    async def place(
        self,
        request: Place,
        bids: Sequence[Bid],
        field: str,
        *,
        tie_share: float,
        tie_s: float,
        uncached_weight: float,
    ) -> tuple[int | None, list[Weighed]]:
        """The index of the bid that was reserved on (None: no room), and all of them weighed.

        `field` is new, and names what is reserved among the worker's. Raises Unavailable when Redis
        is away.
        """
        reserved: list[str] = []
        blocks: list[str] = []
        numbers: list[float] = [
            request.num_tokens,
            self.block_tokens,
            request.num_streams,
            self._ttl_ms,
            tie_share,
            tie_s,
            uncached_weight - 1.0,
            self._guesses.of(request.route_hashes),
        ]
        for bid in bids:
            name, held = _names(request.model, bid.worker_id, bid.epoch)
            reserved.append(name)
            blocks.append(held)
            numbers += bid[_FIRST_NUMBER:]
        names = reserved + blocks
        arguments: list[Part] = [
            request.route_hashes,
            struct.pack(f"<{len(numbers)}d", *numbers),
            field,
        ]
        if request.reservation:
            held, before = IndexKeys(request.model).reserved_by(request.reservation)
            names.append(held)
            arguments.append(before)
        answer = _read(await self._script(names, arguments), len(bids))
        self._guesses.note(request.route_hashes, [each.matched_blocks for each in answer.weighed])
        return answer.chosen - 1 if answer.chosen else None, answer.weighed


@lru_cache(maxsize=_MAX_NAMES)
def _names(model: ModelName, worker_id: WorkerId, epoch: int) -> tuple[str, str]:
    """Keys of what is reserved and of the blocks: made once, asked for with every request."""
    keys = IndexKeys(model)
    return keys.reserved(worker_id, epoch), keys.blocks(worker_id, epoch)


def _read(reply: Reply, num_bids: int) -> _Answer:
    try:
        answer = _decode(reply if isinstance(reply, bytes) else b"")
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the placement script answers in another shape: {error}") from error
    if len(answer.weighed) != num_bids or answer.chosen > num_bids:
        raise ProtocolError("the placement script answers for other workers")
    return answer
