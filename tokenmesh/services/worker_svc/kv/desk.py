"""KvDesk: a source's leases. Others poll for images, and read them from the transfer process."""

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.kv.block_pool import HASH_BYTES
from tokenmesh.engine.kv.shared_arena import SharedKv
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import StreamKey
from tokenmesh.services.worker_svc.kv.asking import ask
from tokenmesh.services.worker_svc.kv.child import TransferProcess
from tokenmesh.services.worker_svc.thread import EngineHost
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.config.kv import KvSettings
from tokenmesh.shared.errors import NotFound, TokenMeshError
from tokenmesh.shared.ids import WorkerId, new_token
from tokenmesh.shared.messages import KvReady, KvStarted, PollKv, PrefillKv, Refused, ReleaseKv
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tokens import pack_ids

logger = logging.getLogger(__name__)

MOST_LEASES: Final = 256
MOST_SLOTS: Final = 1024
"""One answer has at most so many."""
_POLL_S: Final = 0.25
_SWEEP_S: Final = 0.5

LeaseName = tuple[WorkerId, str, int, int]


@dataclass(slots=True, eq=False)
class ReaderLease:
    """Images of one prompt, kept for one reader."""

    number: int
    name: LeaseName
    request: Request
    ends_s: float
    keys: Sequence[bytes] = ()
    """Known once `learning` is over."""
    learning: "asyncio.Task[None] | None" = None
    token: bytes = field(default_factory=new_token)
    is_computing: bool = False
    first: int = -1
    """It is the first of the keys that were lent."""
    num_lent: int = 0
    """All keys before are lent or not asked for."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is answered or ended."""
    is_over: bool = False


@dataclass(slots=True)
class KvDesk:
    """Every lease ends: released, or when its reader is not heard of."""

    settings: KvSettings
    shared: SharedKv
    host: EngineHost
    process: TransferProcess
    begin: Callable[[Request], Coroutine[object, object, None]]
    """Has the engine compute a prompt."""
    cancel: Callable[[StreamKey], None]
    """Ends such a computation; nothing happens if it has ended."""
    num_expired: int = 0
    _leases: dict[int, ReaderLease] = field(default_factory=dict)
    _by_name: dict[LeaseName, ReaderLease] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    _change: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: "set[asyncio.Task[KvReady]]" = field(default_factory=set)
    _endings: "set[asyncio.Task[None]]" = field(default_factory=set)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    async def start(self, message: PrefillKv, request: Request) -> KvStarted | Refused:
        """Lease what the prompt's blocks hold; `request` is what the message's Generate asks for.

        Raises what keeps the prompt from being computed.
        """
        name = (message.reader, *request.key[:3])
        known = self._by_name.get(name)
        if known is not None:
            return self._started(known)
        problem = self._problem(message, request)
        if problem is not None:
            return Refused(reason=problem, retry_after_s=0.0)
        part = _computing_only(request)
        ends_s = monotonic_s() + self.settings.lease_s
        lease = ReaderLease(next(self._numbers), name, part, ends_s)
        self._leases[lease.number] = self._by_name[name] = lease
        try:
            if message.computes:
                lease.is_computing = True
                await self.begin(part)
            lease.learning = asyncio.create_task(self._learn(lease, message))
            # The engine answers between two steps, and one of a long prompt may take longer than
            # a reader waits for a source that is silent.
            await asyncio.wait((lease.learning,), timeout=_POLL_S)
        except BaseException:
            await asyncio.shield(self._end(lease))
            raise
        if lease.is_over:
            return Refused(reason="the lease has ended", retry_after_s=0.0)
        error = lease.learning.exception() if lease.learning.done() else None
        if error is None:
            return self._started(lease)
        await self._end(lease)
        if isinstance(error, NotFound):
            return Refused(reason=error.message, retry_after_s=0.0)
        raise error

    async def _learn(self, lease: ReaderLease, message: PrefillKv) -> None:
        """Ask the engine for the keys of a lease. Raises NotFound where it has other ones."""
        part, given = lease.request, message.hashes
        known = [given[at : at + HASH_BYTES] for at in range(0, len(given), HASH_BYTES)]
        keys = await ask(
            self.host, lambda engine: engine.exchange.keys_of(part, message.num_blocks, known)
        )
        if part.kv.hashes[message.num_blocks - 1] != message.last_key:
            raise NotFound("this worker has other keys for the prompt")
        lease.keys = keys

    def _problem(self, message: PrefillKv, request: Request) -> str | None:
        if message.scope != self.shared.scope:
            return "KV of another model, or computed in another way"
        if not self.process.is_able:
            return "the transfer process does not run"
        if len(self._leases) >= MOST_LEASES:
            return f"{MOST_LEASES} leases are here already"
        most = (request.num_known - 1) // self.shared.block_size
        if not 0 < message.num_blocks <= most:
            return f"{message.num_blocks} blocks of {most}"
        if message.hashes and message.computes:
            # what is computed is kept under hashes that this worker has made
            return "hashes of a prompt that is to be computed"
        if len(message.hashes) not in (0, HASH_BYTES * message.num_blocks):
            return f"{len(message.hashes)} bytes are not the hashes of {message.num_blocks} blocks"
        return None

    def _started(self, lease: ReaderLease) -> KvStarted:
        return KvStarted(
            lease=lease.number,
            token=lease.token,
            lease_s=self.settings.lease_s,
            addresses=self.process.addresses,
        )

    async def poll(self, message: PollKv) -> KvReady:
        """Return what is there behind the first `have` keys; nothing where the engine is busy for
        long.

        Raises NotFound, Unavailable.
        """
        lease = self._find(message.lease, message.token)
        until_s = monotonic_s() + _POLL_S
        while True:
            change = self._change
            ready = await self._ready_soon(lease, message.have, until_s)
            rest_s = until_s - monotonic_s()
            if ready.slots or ready.is_done or rest_s <= 0:
                lease.ends_s = monotonic_s() + self.settings.lease_s
                return ready
            try:
                async with asyncio.timeout(rest_s):
                    await change.wait()
            except TimeoutError:
                continue

    async def _ready_soon(self, lease: ReaderLease, have: int, until_s: float) -> KvReady:
        """The next images; none where they are not known in time. A later poll finds them."""
        answer = asyncio.create_task(self._ready(lease, have))
        self._answers.add(answer)
        answer.add_done_callback(self._forget)
        rest_s = max(0.0, until_s - monotonic_s())
        done, _ = await asyncio.wait((answer,), timeout=rest_s)
        if done:
            return answer.result()
        return _nothing_yet(lease, have)

    def _forget(self, answer: "asyncio.Task[KvReady]") -> None:
        self._answers.discard(answer)
        # read, or asyncio logs an error of an answer that came too late: the next poll fails too
        if not answer.cancelled():
            answer.exception()

    async def _ready(self, lease: ReaderLease, have: int) -> KvReady:
        if lease.learning is None:
            # asked for a second time while the computation has not begun
            return _nothing_yet(lease, have)
        await asyncio.wait((lease.learning,))
        async with lease.lock:
            if lease.is_over:
                raise NotFound("the lease has ended")
            lease.learning.result()
            if not 0 <= have <= len(lease.keys):
                raise NotFound("the lease has ended")
            # read first: what is computed then is saved when the engine is asked
            is_computing = lease.is_computing
            if lease.first < 0:
                lease.first = lease.num_lent = have
            if not lease.first <= have:
                raise NotFound("those images were not asked for")
            again = lease.keys[have : min(lease.num_lent, have + MOST_SLOTS)]
            new = lease.keys[lease.num_lent : have + MOST_SLOTS] if have <= lease.num_lent else ()
            slots = await ask(
                self.host,
                lambda engine: engine.exchange.slots_of(again) + engine.exchange.lend(new),
            )
            lease.num_lent += max(0, len(slots) - len(again))
            end = have + len(slots)
            is_done = end == len(lease.keys) or (not is_computing and len(slots) < MOST_SLOTS)
            sums = b""
            if slots:
                sums = await self.process.serve(lease.number, lease.token, slots)
            return KvReady(
                first=have,
                slots=pack_ids(slots),
                checksums=sums,
                computed=_computed_of(lease.request),
                is_done=is_done,
            )

    async def release(self, message: ReleaseKv) -> None:
        """The reader needs the lease no more; nothing happens if it has ended."""
        lease = self._leases.get(message.lease)
        if lease is not None and hmac.compare_digest(lease.token, message.token):
            await self._end(lease)

    def note(self, output: StepOutput) -> None:
        """A step has ended: images may be there."""
        if not self._leases:
            return
        for ended in output.ended:
            if ended.request.spec.computes_only:
                for lease in self._leases.values():
                    if lease.request is ended.request:
                        lease.is_computing = False
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def sweep_forever(self) -> None:
        """End the leases of readers that are not heard of."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = monotonic_s()
            for lease in [each for each in self._leases.values() if each.ends_s < now]:
                self.num_expired += 1
                logger.info("the reader of KV lease %d is not heard of", lease.number)
                await self._end(lease)

    async def end_all(self) -> None:
        for lease in list(self._leases.values()):
            await self._end(lease)

    def _find(self, number: int, token: bytes) -> ReaderLease:
        lease = self._leases.get(number)
        if lease is None or not hmac.compare_digest(lease.token, token):
            raise NotFound("there is no such lease")
        return lease

    async def _end(self, lease: ReaderLease) -> None:
        """It goes on when its caller leaves: a message's deadline must not leave images pinned."""
        ending = asyncio.create_task(self._give_back(lease))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        await asyncio.shield(ending)

    async def _give_back(self, lease: ReaderLease) -> None:
        async with lease.lock:
            if lease.is_over:
                return
            lease.is_over = True
            self._leases.pop(lease.number, None)
            self._by_name.pop(lease.name, None)
            if lease.learning is not None:
                lease.learning.cancel()
            if lease.is_computing:
                self.cancel(lease.request.key)
            # no read by it may go on when its slots change
            await self.process.revoke(lease.number)
            lent = lease.keys[max(0, lease.first) : lease.num_lent]
            if lent:
                try:
                    await ask(self.host, lambda engine: engine.exchange.take_back(lent))
                except TokenMeshError as error:
                    logger.error("images stay pinned: %s", error)


def _nothing_yet(lease: ReaderLease, have: int) -> KvReady:
    """An answer without images, after which the reader asks again."""
    computed = _computed_of(lease.request)
    return KvReady(first=have, slots=b"", checksums=b"", computed=computed, is_done=False)


def _computing_only(request: Request) -> Request:
    """The same request, of which nothing is drawn."""
    gateway, stream, attempt, _ = request.key
    num_drawn = request.num_known - request.num_prompt
    spec = replace(
        request.spec,
        # apart from a stream of the same number that the gateway may have here
        key=StreamKey(gateway, -1 - stream, attempt),
        sampling=SamplingParams(seed=0, max_tokens=num_drawn + 1),
        eos_ids=frozenset(),
        reads_all=False,
        computes_only=True,
    )
    return Request(spec, request.token_ids)


def _computed_of(request: Request) -> int:
    """Tokens of the prompt that this worker has computed for it."""
    cached = request.place.num_cached
    return 0 if cached is None else max(0, request.num_prompt - cached)
