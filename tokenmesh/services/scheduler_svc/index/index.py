"""PlacementIndex: one script call finds prefixes, weighs the workers and reserves on the best."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final

import msgspec

from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.prefix_index.keys import IndexKeys
from tokenmesh.shared.prefix_index.scripts import with_shared
from tokenmesh.shared.redis import Redis, Reply

_SOURCE: Final = with_shared(files(__package__).joinpath("place.lua").read_text(encoding="utf-8"))
_MAX_NAMES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """What a worker's last beat says, as the script needs it."""

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


_decode: Final = msgspec.msgpack.Decoder(list[int | Weighed]).decode


class PlacementIndex:
    """Stateless: any number of schedulers share what is in Redis."""

    def __init__(self, redis: Redis, block_tokens: int, lifetime_s: float) -> None:
        """`lifetime_s`: after that a reservation that nobody released is given back."""
        self.redis = redis
        self._script = redis.script(_SOURCE)
        self.block_tokens = block_tokens
        self._lifetime_ms = max(1, round(lifetime_s * 1000))

    async def place(
        self,
        request: Place,
        bids: Sequence[Bid],
        reservation_id: str,
        *,
        tie_share: float,
        tie_s: float,
        uncached_weight: float,
    ) -> tuple[int | None, list[Weighed]]:
        """The index of the bid that was reserved on (None: no room), and all of them weighed.

        Raises Unavailable when Redis is away.
        """
        keys = IndexKeys(request.model)
        reservation = keys.reservation(reservation_id)
        previous = keys.reservation(request.reservation) if request.reservation else reservation
        loads: list[str] = []
        blocks: list[str] = []
        numbers: list[float] = [
            request.num_tokens,
            self.block_tokens,
            request.num_streams,
            self._lifetime_ms,
            tie_share,
            tie_s,
            uncached_weight - 1.0,
        ]
        for bid in bids:
            load, held = _names(request.model, bid.worker_id, bid.epoch)
            loads.append(load)
            blocks.append(held)
            numbers += (
                bid.prefill_tokens_per_s,
                bid.queued_tokens,
                bid.extra_s,
                bid.num_started,
                bid.num_starting,
                bid.num_room,
                bid.is_indexed,
            )
        names = [keys.expiries, reservation, previous, *loads, *blocks]
        arguments = [request.route_hashes, struct.pack(f"<{len(numbers)}d", *numbers)]
        return _read(await self._script(names, arguments), len(bids))


@lru_cache(maxsize=_MAX_NAMES)
def _names(model: ModelName, worker_id: WorkerId, epoch: int) -> tuple[str, str]:
    """Keys of a worker's load and of its blocks: made once, asked for with every request."""
    keys = IndexKeys(model)
    return keys.load(worker_id, epoch), keys.blocks(worker_id, epoch)


def _read(reply: Reply, num_bids: int) -> tuple[int | None, list[Weighed]]:
    try:
        chosen, *found = _decode(reply if isinstance(reply, bytes) else b"")
    except msgspec.DecodeError as error:
        raise ProtocolError(f"the placement script answers in another shape: {error}") from error
    if not isinstance(chosen, int) or len(found) != num_bids or chosen > num_bids:
        raise ProtocolError("the placement script answers for other workers")
    weighed = [each for each in found if isinstance(each, Weighed)]
    return chosen - 1 if chosen else None, weighed
