"""A worker that computes nothing: it sends what a script says, and fails as a test sets it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenmesh.shared.bus.base import Envelope, Subscription
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.ids import WorkerId, new_epoch
from tokenmesh.shared.messages import (
    Accepted,
    Cancel,
    Done,
    Failed,
    Generate,
    Heartbeat,
    Message,
    Ping,
    Pool,
    Refused,
    Resend,
    StreamUnknown,
    Tokens,
)
from tokenmesh.shared.messages.beat import ModelCard, WorkerLoad
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.messages.tokens import Delta, FinishReason, TokenLogprobs
from tokenmesh.shared.subjects import beat, gateway_tokens, worker_control, worker_generate
from tokenmesh.shared.tokens import count_ids, pack_ids

Script = Callable[[Generate], list[int]]
"""The whole output of a stream, the end-of-sequence token included."""

CACHED_TOKENS = 3


@dataclass
class Faults:
    """The faults of a worker. Counts are of tokens per stream or of Tokens messages."""

    drops: set[int] = field(default_factory=set)
    """Numbers of the Tokens messages that are lost on their way."""
    repeats: bool = False
    """Every Tokens message comes twice."""
    hangs_after: int | None = None
    """Say and hear nothing any more after so many messages."""
    dies_after: int | None = None
    breaks_off_after: int | None = None
    """End each stream with "abort" after so many tokens."""
    fails_with: Failed | None = None
    refuses: bool = False
    refuses_number: int | None = None
    """The number of the Generate that is refused, counted from 1."""
    hides_end: bool = False
    """Never say that a stream is over."""
    is_deaf: bool = False
    """Hear nothing at all."""


@dataclass(eq=False)
class Run:
    """One stream."""

    generate: Generate
    ids: list[int]
    sent: int
    is_over: bool = False


class FakeWorker:
    """One worker with a connection of its own, so that it can die alone."""

    def __init__(
        self,
        bus: MessageBus,
        worker_id: WorkerId,
        card: ModelCard,
        script: Script,
        *,
        eos_id: int,
        step_s: float = 0.002,
        tokens_per_step: int = 1,
    ) -> None:
        self.id = worker_id
        self.epoch = new_epoch()
        self.faults = Faults()
        self.runs: dict[tuple[str, int], Run] = {}
        self.received: list[Message] = []
        self.num_messages = 0
        self.distribution: Callable[[Generate], TokenLogprobs] | None = None
        """Makes the log-probabilities of a stream's next token, in place of a fixed table."""
        self.pool: Callable[[Pool], Message | None] = lambda _: None
        """Answers a Pool; None: not at all."""
        self.ignored_cancels = 0
        """The number of Cancels that are lost on their way."""
        self._bus = bus
        self._card = card
        self.script = script
        self._eos_id = eos_id
        self.step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._released = asyncio.Event()
        self._released.set()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def generates(self) -> list[Generate]:
        """Every Generate that arrived."""
        return [each for each in self.received if isinstance(each, Generate)]

    @property
    def pools(self) -> list[Pool]:
        """Every Pool that arrived."""
        return [each for each in self.received if isinstance(each, Pool)]

    @property
    def cancels(self) -> list[Cancel]:
        """Every Cancel that arrived."""
        return [each for each in self.received if isinstance(each, Cancel)]

    async def start(self) -> None:
        for subject in (worker_generate(self.id), worker_control(self.id)):
            self._subscriptions.append(await self._bus.subscribe(subject, self._receive))
        await self._bus.flush()
        self._tasks = [asyncio.create_task(work()) for work in (self._step_forever, self._beat)]

    def hold(self) -> None:
        """Compute nothing until `release`."""
        self._released.clear()

    def release(self, burst: int) -> None:
        """Go on, `burst` tokens a step."""
        self._tokens_per_step = burst
        self._released.set()

    async def die(self) -> None:
        """As by kill -9: the server knows at once that it is gone."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for subscription in self._subscriptions:
            await subscription.stop()
        self._subscriptions = []
        await self._bus.flush()

    async def stop(self) -> None:
        await self.die()
        await self._bus.close()

    async def _receive(self, envelope: Envelope) -> None:
        message = envelope.message
        if self.faults.is_deaf or isinstance(message, Tokens):
            return
        self.received.append(message)
        answer = self._answer(message)
        if answer is not None:
            await self._bus.reply(envelope, answer)

    def _answer(self, message: Message) -> Message | None:
        if isinstance(message, Generate):
            return self._accept(message)
        if isinstance(message, Pool):
            return self.pool(message)
        if isinstance(message, Cancel):
            run = self.runs.get((message.gateway, message.stream))
            if self.ignored_cancels:
                self.ignored_cancels -= 1
            elif run is not None and run.generate.attempt == message.attempt:
                run.is_over = True
            return Done()
        if isinstance(message, Resend):
            run = self.runs.get((message.gateway, message.stream))
            if run is None or run.generate.attempt != message.attempt:
                return StreamUnknown()
            run.sent = min(run.sent, message.offset)
            run.is_over = False
            return Done()
        return Done() if isinstance(message, Ping) else None

    def _accept(self, message: Generate) -> Message:
        if self.faults.refuses or len(self.generates) == self.faults.refuses_number:
            return Refused(reason="full", retry_after_s=0.5)
        if message.epoch != self.epoch:
            return to_failed(Overloaded("another incarnation"))
        key = (message.gateway, message.stream)
        ids = self.script(message)[: message.sampling.max_tokens]
        self.runs[key] = Run(message, ids, count_ids(message.output_ids))
        return Accepted(worker_id=self.id)

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            await self._released.wait()
            deltas: dict[str, list[Delta]] = {}
            for run in tuple(self.runs.values()):
                if not run.is_over:
                    deltas.setdefault(run.generate.gateway, []).append(self._advance(run))
            for gateway, mine in deltas.items():
                await self._publish(gateway, mine)

    def _advance(self, run: Run) -> Delta:
        first, generate = run.sent, run.generate
        ids = run.ids[first : first + self._tokens_per_step]
        run.sent += len(ids)
        finish = self._finish(run)
        run.is_over = finish is not None
        if self.faults.hides_end:
            finish = None
        is_first = first == count_ids(generate.output_ids)
        wants_prompt = generate.sampling.prompt_logprobs is not None
        logprobs = None
        if generate.sampling.logprobs is not None:
            logprobs = [self._logprobs(each, generate.sampling.logprobs) for each in ids]
        if generate.sampling.logprob_token_ids:
            named = generate.sampling.logprob_token_ids
            values = [-float(each) for each in named]
            logprobs = [TokenLogprobs(each, -0.5, 1, named, values) for each in ids]
        if self.distribution is not None:
            logprobs = [self.distribution(generate)]
        return Delta(
            stream=generate.stream,
            attempt=generate.attempt,
            offset=first,
            token_ids=pack_ids(ids),
            finish=finish,
            logprobs=logprobs,
            cached_tokens=CACHED_TOKENS if is_first else None,
            prompt_logprobs=self._prompt_logprobs(generate) if is_first and wants_prompt else None,
            error=self.faults.fails_with if finish == "error" else None,
        )

    def _finish(self, run: Run) -> FinishReason | None:
        if self.faults.fails_with is not None:
            return "error"
        limit = self.faults.breaks_off_after
        if limit is not None and run.sent >= limit:
            return "abort"
        if run.sent < len(run.ids):
            return None
        if run.generate.sampling.repetition is not None:
            return "repetition"
        return "stop" if run.ids[-1] == self._eos_id else "length"

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        tops = [token_id, *(each for each in range(10, 10 + num_top) if each != token_id)]
        chosen = tops[:num_top]
        values = [-0.5 - 0.25 * index for index in range(len(chosen))]
        return TokenLogprobs(token_id, -0.5, 1, chosen, values)

    def _prompt_logprobs(self, generate: Generate) -> list[TokenLogprobs | None]:
        from tokenmesh.shared.tokens import unpack_ids

        num_top = generate.sampling.prompt_logprobs or 0
        ids = unpack_ids(generate.prompt_ids)
        return [None, *(self._logprobs(each, num_top) for each in ids[1:])]

    async def _publish(self, gateway: str, deltas: list[Delta]) -> None:
        faults = self.faults
        self.num_messages += 1
        if faults.hangs_after is not None and self.num_messages > faults.hangs_after:
            faults.is_deaf = True
            return
        if faults.dies_after is not None and self.num_messages > faults.dies_after:
            await self.die()
            # The task that runs this is the worker's own: nothing follows.
            raise asyncio.CancelledError
        if self.num_messages in faults.drops:
            return
        tokens = Tokens(worker_id=self.id, epoch=self.epoch, step=self.num_messages, deltas=deltas)
        for _ in range(2 if faults.repeats else 1):
            await self._bus.publish(gateway_tokens(gateway), tokens)  # type: ignore[arg-type]

    async def _beat(self) -> None:
        sequence = 0
        while True:
            sequence += 1
            message = Heartbeat(
                service="worker",
                instance_id=self.id,  # type: ignore[arg-type]
                epoch=self.epoch,
                sequence=sequence,
                version="0",
                interval_s=0.25,
                models=[self._card],
                load=WorkerLoad(running=len(self.runs)),
            )
            if not self.faults.is_deaf:
                await self._bus.publish(beat("worker", self.id), message)  # type: ignore[arg-type]
            await asyncio.sleep(0.25)
