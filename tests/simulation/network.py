"""A network of buses that drops, delays and repeats messages by a seeded plan.

It stands in for NATS in the simulation only: every message is encoded and decoded on its way, at
most once delivery is broken on purpose, and `NoResponders` is reported as the real server does.
"""

import asyncio
import fnmatch
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from tokenmesh.shared.bus.base import Envelope, Headers, RawReceiver, Receiver
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.codec import decode, decode_tokens, encode
from tokenmesh.shared.errors import DeadlineExceeded, NoResponders
from tokenmesh.shared.messages import Failed, Message, Queued, Tokens
from tokenmesh.shared.messages.failed import from_failed


@dataclass
class Faults:
    """The faults of the network, in shares [0, 1] and seconds. Shares in [0, 1], seconds."""

    drop: float = 0.0
    repeat: float = 0.0
    max_delay_s: float = 0.001


@dataclass(eq=False)
class Subscriber:
    """One subscription of one process."""

    network: "Network"
    owner: "SimBus"
    pattern: str
    receiver: Receiver
    queue: str | None
    inbox: asyncio.Queue[Envelope] = field(default_factory=asyncio.Queue)
    pump: asyncio.Task[None] | None = None

    def matches(self, subject: str) -> bool:
        return fnmatch.fnmatchcase(subject, self.pattern.replace(">", "*"))

    async def run(self) -> None:
        while True:
            envelope = await self.inbox.get()
            await self.owner.is_running.wait()
            await self.receiver(envelope)

    async def stop(self) -> None:
        self.network.subscribers.remove(self)
        if self.pump is not None:
            self.pump.cancel()


class Network:
    """The messages of all; one seeded generator decides what happens to each."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.subscribers: list[Subscriber] = []
        self.inboxes: dict[str, asyncio.Queue[Message]] = {}
        self.counts = {"sent": 0, "dropped": 0, "repeated": 0}
        self._numbers = iter(range(1, 1 << 60))

    def new_inbox(self) -> str:
        name = f"_INBOX.{next(self._numbers)}"
        self.inboxes[name] = asyncio.Queue()
        return name

    def deliver(self, envelope: Envelope) -> bool:
        """Schedule delivery; False without a listener. Replies go to inboxes."""
        if envelope.subject in self.inboxes or envelope.subject.startswith("_INBOX."):
            self._copies(partial(self._to_inbox, envelope), self.faults_of(envelope))
            return True
        receivers = self._receivers(envelope.subject)
        for subscriber in receivers:
            action = partial(self._to_subscriber, subscriber, envelope)
            self._copies(action, self.faults_of(envelope))
        return bool(receivers)

    def _receivers(self, subject: str) -> list[Subscriber]:
        matching = [subscriber for subscriber in self.subscribers if subscriber.matches(subject)]
        groups: dict[str, list[Subscriber]] = {}
        for subscriber in matching:
            if subscriber.queue is not None:
                groups.setdefault(subscriber.queue, []).append(subscriber)
        chosen = [self.random.choice(group) for _, group in sorted(groups.items())]
        return [subscriber for subscriber in matching if subscriber.queue is None] + chosen

    def faults_of(self, _envelope: Envelope) -> Faults:
        """The faults that a message may meet."""
        return self.faults

    def _copies(self, action: Callable[[], None], faults: Faults) -> None:
        self.counts["sent"] += 1
        if self.random.random() < faults.drop:
            self.counts["dropped"] += 1
            return
        copies = 1
        if self.random.random() < faults.repeat:
            self.counts["repeated"] += 1
            copies = 2
        loop = asyncio.get_running_loop()
        for _ in range(copies):
            loop.call_later(self.random.random() * faults.max_delay_s, action)

    def _to_subscriber(self, subscriber: Subscriber, envelope: Envelope) -> None:
        if subscriber in self.subscribers:
            subscriber.inbox.put_nowait(envelope)

    def _to_inbox(self, envelope: Envelope) -> None:
        inbox = self.inboxes.get(envelope.subject)
        if inbox is not None and not isinstance(envelope.message, Tokens):
            inbox.put_nowait(envelope.message)


class SimBus:
    """One process's connection to the simulated network."""

    max_message_bytes = 4 * 1024 * 1024

    def __init__(self, network: Network) -> None:
        self.network = network
        self.connected = True
        self.is_running = asyncio.Event()
        """Cleared: the process stands still."""
        self.is_running.set()

    def kill(self) -> None:
        """The process dies: nothing more comes from it or reaches it."""
        self.connected = False
        mine = [one for one in self.network.subscribers if one.owner is self]
        for subscriber in mine:
            self.network.subscribers.remove(subscriber)
            if subscriber.pump is not None:
                subscriber.pump.cancel()

    async def converse(
        self, subject: str, message: Message, *, deadline_s: float, idle_s: float
    ) -> AsyncIterator[Message]:
        inbox = self.network.new_inbox()
        try:
            self._send(subject, message, Headers(deadline_s=deadline_s), reply_to=inbox)
            while True:
                answer = await self._await_answer(inbox, min(idle_s, deadline_s - now_s()))
                yield answer
                if not isinstance(answer, Queued):
                    return
        finally:
            del self.network.inboxes[inbox]

    async def request(
        self,
        subject: str,
        message: Message,
        *,
        deadline_s: float,
        retries: int = 0,
        alone: str | None = None,
    ) -> Message:
        assert alone is None, "no process of the simulation ends with its requests"
        for attempt in range(retries + 1):
            try:
                async for answer in self.converse(
                    subject, message, deadline_s=deadline_s, idle_s=deadline_s - now_s()
                ):
                    if not isinstance(answer, Queued):
                        return answer
            except NoResponders:
                if attempt == retries:
                    raise
                await asyncio.sleep(0.01)
        raise DeadlineExceeded(f"no answer on {subject}")

    async def _await_answer(self, inbox: str, seconds: float) -> Message:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                answer = await self.network.inboxes[inbox].get()
        except TimeoutError:
            raise DeadlineExceeded("no answer in time") from None
        if isinstance(answer, Failed):
            raise from_failed(answer)
        return answer

    def _send(
        self, subject: str, message: Message | Tokens, headers: Headers, reply_to: str | None
    ) -> None:
        if not self.connected:
            return
        if isinstance(message, Tokens):
            copy: Message | Tokens = decode_tokens(encode(message))
        else:
            copy = decode(encode(message))
        delivered = self.network.deliver(Envelope(subject, copy, headers, reply_to))
        if not delivered and reply_to is not None:
            raise NoResponders(f"no listener on {subject}")

    async def publish(
        self, subject: str, message: Message | Tokens, *, headers: Headers | None = None
    ) -> None:
        self._send(subject, message, headers or Headers(), None)

    async def publish_raw(self, subject: str, data: bytes) -> None:
        return

    async def subscribe(
        self, subject: str, receiver: Receiver, *, queue: str | None = None
    ) -> Subscriber:
        subscriber = Subscriber(self.network, self, subject, receiver, queue)
        subscriber.pump = asyncio.get_running_loop().create_task(subscriber.run())
        self.network.subscribers.append(subscriber)
        return subscriber

    async def answer_raw(self, subject: str, answer: object) -> Subscriber:
        return await self.subscribe_raw(subject, _nothing)

    async def subscribe_raw(self, subject: str, receiver: RawReceiver) -> Subscriber:
        async def nothing(envelope: Envelope) -> None:
            return

        return await self.subscribe(subject, nothing)

    async def reply(self, envelope: Envelope, message: Message) -> None:
        if envelope.reply_to is not None:
            self._send(envelope.reply_to, message, replace(envelope.headers), None)

    async def flush(self) -> None:
        return

    async def close(self) -> None:
        self.kill()


async def _nothing(subject: str, data: bytes) -> None:
    return
