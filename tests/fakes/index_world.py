"""A few workers with their writers, the placement script, and a model that knows what is right.

The model is exact: what a worker wrote last is matched to the block, what is reserved is the sum of
the reservations that were not released.
"""

import secrets
from dataclasses import dataclass, field
from random import Random

from tokenmesh.engine.kv.route_ledger import RouteChange
from tokenmesh.services.scheduler_svc.index.placement_index import CandidateLoad, PlacementIndex
from tokenmesh.services.worker_svc.prefix_index.writer import IndexWriter
from tokenmesh.shared.config.placement import PrefixIndexSettings, SchedulerSettings
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.place import Place
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.prefix_index import IndexKeys
from tokenmesh.shared.redis import Redis

BLOCK, WORKERS, FAMILIES, LONGEST = 64, 3, 4, 40
# Nothing may be over by itself: the model knows no time.
LIMITS = PrefixIndexSettings(
    write_batch=7, max_changes=60, ttl_s=3600, reservation_s=3600, retry_s=0.001
)


def chain(family: int, first: int, end: int) -> list[bytes]:
    return [(family << 32 | index + 1).to_bytes(8, "little") for index in range(first, end)]


@dataclass
class Incarnation:
    writer: IndexWriter
    epoch: int
    depths: dict[int, int] = field(default_factory=dict)
    """By family: what the engine has."""
    written: dict[int, int] = field(default_factory=dict)
    """By family: what was written to Redis."""
    reserved: dict[str, tuple[int, int]] = field(default_factory=dict)


class World:
    """A few workers, one model, one scheduler."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.keys = IndexKeys(ModelName(f"m-{secrets.token_hex(6)}"))
        self.index = PlacementIndex(redis, BLOCK, SchedulerSettings(), LIMITS)
        self.metrics = Metrics()
        self.num_matches = 0
        self.workers = [self._born(number) for number in range(WORKERS)]

    def _born(self, number: int) -> Incarnation:
        epoch = secrets.randbits(62)
        name = WorkerId(f"w{number}")
        return Incarnation(
            IndexWriter(self.redis, self.keys.model, name, epoch, LIMITS, self.metrics), epoch
        )

    def store(self, number: int, family: int, depth: int) -> None:
        worker = self.workers[number]
        known = worker.depths.get(family, 0)
        change = dict.fromkeys(chain(family, known, depth), True)
        worker.writer.note(RouteChange(is_there=change))
        worker.depths[family] = max(known, depth)

    def evict(self, number: int, family: int, depth: int) -> None:
        worker = self.workers[number]
        known = worker.depths.get(family, 0)
        change = dict.fromkeys(chain(family, depth, known), False)
        worker.writer.note(RouteChange(is_there=change))
        worker.depths[family] = min(known, depth)

    def clear(self, number: int) -> None:
        self.workers[number].writer.note(RouteChange(is_cleared=True))
        self.workers[number].depths.clear()

    def restart(self, number: int) -> None:
        """A new incarnation; what the old one wrote stays where it is."""
        self.workers[number] = self._born(number)

    async def flush(self, number: int) -> None:
        worker = self.workers[number]
        assert await worker.writer.flush()
        worker.written = dict(worker.depths)

    async def lose(self, number: int) -> None:
        """Redis forgets the set."""
        worker = self.workers[number]
        await self.redis.call("DEL", self.keys.blocks(WorkerId(f"w{number}"), worker.epoch))
        worker.written = {}

    async def place(self, family: int, length: int, rest: int) -> None:
        request = Place(
            request_id=RequestId("r"),
            model=self.keys.model,
            num_tokens=length * BLOCK + rest,
            max_tokens=1,
            num_streams=1 + rest % 2,
            route_hashes=b"".join(chain(family, 0, length)),
        )
        loads = [self._load(number, each) for number, each in enumerate(self.workers)]
        name = secrets.token_hex(8)
        chosen, scores = await self.index.place(request, loads, name)
        for worker, each in zip(self.workers, scores, strict=True):
            assert each.matched_blocks == min(worker.written.get(family, 0), length)
            held = worker.reserved.values()
            assert each.reserved_tokens == sum(tokens for tokens, _ in held)
            assert each.reserved_streams == sum(streams for _, streams in held)
            self.num_matches += 1
        assert chosen is not None
        uncached = max(1, request.num_tokens - scores[chosen].matched_blocks * BLOCK)
        self.workers[chosen].reserved[name] = (uncached, request.num_streams)

    def _load(self, number: int, worker: Incarnation) -> CandidateLoad:
        return CandidateLoad(
            worker_id=WorkerId(f"w{number}"),
            epoch=worker.epoch,
            prefill_tokens_per_s=1000.0 * (number + 1),
            queued_tokens=0,
            extra_s=0.0,
            num_started=0,
            num_starting=0,
            num_room=1 << 30,
            is_indexed=True,
        )

    def release(self, number: int, which: int) -> None:
        """Tell the writer of half of what the worker holds; it gives it back when it writes."""
        worker = self.workers[number]
        for name in list(worker.reserved)[which % 2 :: 2]:
            worker.writer.release(name)

    async def progress(self, number: int, share: int) -> None:
        """Compute all but a `share`-th of each prompt that is reserved."""
        worker = self.workers[number]
        left = {name: tokens // share for name, (tokens, _) in worker.reserved.items()}
        worker.writer.note_progress(left)
        await self.flush(number)
        for name, tokens in left.items():
            worker.reserved[name] = (tokens, worker.reserved[name][1])

    async def flush_releases(self, number: int, which: int) -> None:
        worker = self.workers[number]
        self.release(number, which)
        await self.flush(number)
        for name in list(worker.reserved)[which % 2 :: 2]:
            del worker.reserved[name]

    async def end(self) -> None:
        names = await self.redis.call("KEYS", f"kvx:{{{self.keys.model}}}:*")
        if isinstance(names, list) and names:
            await self.redis.call("DEL", *[str(name, "ascii") for name in names])  # type: ignore[arg-type]


async def stroll(world: World, dice: Random, num_operations: int) -> None:
    """Random operations, most of them placements."""
    for _ in range(num_operations):
        number, family = dice.randrange(WORKERS), dice.randrange(FAMILIES)
        depth, kind = dice.randrange(LONGEST + 1), dice.random()
        if kind < 0.5:
            await world.place(family, depth, dice.randrange(1, BLOCK))
        elif kind < 0.65:
            world.store(number, family, depth)
        elif kind < 0.75:
            world.evict(number, family, depth)
        elif kind < 0.85:
            await world.flush(number)
        elif kind < 0.91:
            await world.progress(number, 1 + depth % 3)
        elif kind < 0.97:
            await world.flush_releases(number, depth)
        elif kind < 0.98:
            world.clear(number)
        elif kind < 0.99:
            await world.lose(number)
        else:
            world.restart(number)
