"""Delivery: all prompts of a response run through the mesh, and their output arrives as chunks.

Inbox is where the output arrives. One wake-up serves everything that has arrived since the last
one: a slow client gets fewer, larger frames. Past its bound the response ends with an error, so
memory stays bounded too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from tokenmesh.services.gateway.core.generation.choice import Choice
from tokenmesh.services.gateway.core.generation.chunk import Output, OutputChunk
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Prompt, PromptJob
from tokenmesh.services.gateway.core.generation.usage import Usage, count_usage
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import Cancelled, DeadlineExceeded, Overloaded, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally


class Inbox:
    """Outputs of several choices in order of arrival, for one reader."""

    __slots__ = (
        "_closers",
        "_error",
        "_max_tokens",
        "_num_tokens",
        "_outputs",
        "_reader",
        "_waiter",
    )

    def __init__(self, max_tokens: int, reader: str = "the client") -> None:
        """`reader` is named in the error when more than `max_tokens` tokens are unread."""
        self._reader = reader
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._outputs: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: TokenMeshError | None = None
        self._closers: dict[int, Callable[[], None]] = {}

    def connect(self, choice: int, close: Callable[[], None]) -> None:
        """Register the function that closes a choice's stream."""
        self._closers[choice] = close

    def close(self, choice: int) -> None:
        """Close the stream of a choice that needs no more tokens."""
        self._closers.pop(choice)()

    def put(self, choice: int, output: Output) -> None:
        """Add an output of a choice's stream."""
        if output.error is not None:
            self.fail(output.error)
            return
        self._outputs.append((choice, output))
        self._num_tokens += len(output.token_ids)
        if self._num_tokens > self._max_tokens:
            self.fail(
                Overloaded(
                    f"{self._reader} is more than {self._max_tokens} tokens behind "
                    "(gateway.max_buffered_tokens)"
                )
            )
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def complete(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Add complete choices. The bound does not apply: they arrive all at once."""
        self._outputs.extend(outputs)
        self._wake()

    def fail(self, error: TokenMeshError) -> None:
        """End the response with an error; unread outputs are dropped."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self) -> list[tuple[int, Output]]:
        """Wait for at least one output and return all. Raises the error given to `fail`."""
        if not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        outputs, self._outputs, self._num_tokens = self._outputs, [], 0
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Charges(Protocol):
    """Counts usage; `tenancy.admission.Admission` implements it."""

    def charge(self, tenant: Tenant, model: str, usages: Iterable[Usage], name: str = "") -> None:
        """Count the usage of a response that has ended."""


class PromptRunner(Protocol):
    """The mesh as a response needs it; `mesh.pipeline.Pipeline` implements it."""

    def run(
        self, jobs: Sequence[PromptJob], inbox: Inbox
    ) -> AbstractAsyncContextManager[Sequence[Prompt]]:
        """Inside the block the jobs' output arrives in `inbox`; leaving it cancels what runs."""


class Delivery:
    """The choices of one response while they are generated."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        choices: Sequence[Choice],
        inbox: Inbox,
        detokenizing: Tally,
        block_size: int = 0,
    ) -> None:
        """`block_size`: tokens of a block in the worker's prefix cache; 0: it has none."""
        self.prompts = prompts
        self.choices = choices
        self._block_size = block_size
        self._inbox = inbox
        self._detokenizing = detokenizing
        self._num_open = len(choices)
        self.is_complete = not choices
        """It tells whether every choice has ended."""

    def usage(self) -> Usage:
        """Tokens so far; final when `is_complete`."""
        return count_usage(self.prompts, self.choices, self._block_size)

    async def chunks(self) -> AsyncIterator[list[OutputChunk]]:
        """Everything that arrived since the last time, until every choice has ended.

        Raises the error that ends the response.
        """
        while self._num_open:
            # Not by `receive`: each token resumes every function on the way to it.
            chunks = self.push(await self._inbox.get())
            if chunks:
                yield chunks

    async def receive(self) -> Sequence[tuple[int, Output]]:
        """New output of the streams, by choice. Raises the error that ends the response."""
        return await self._inbox.get()

    def abort(self) -> None:
        """End every open choice with the tokens that have arrived."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._inbox.put(choice.index, Output(finish="abort"))

    def push(self, outputs: Sequence[tuple[int, Output]]) -> list[OutputChunk]:
        """Turn output, as `receive` returned it now or in an earlier process, into chunks."""
        chunks: list[OutputChunk] = []
        with self._detokenizing:
            for index, output in outputs:
                chunk = self.choices[index].push(output)
                if chunk is None:
                    continue
                if chunk.finish_reason is not None:
                    self._num_open -= 1
                    self.is_complete = not self._num_open
                    self._inbox.close(index)
                chunks.append(chunk)
        return chunks


@asynccontextmanager
async def deliver(
    pipeline: PromptRunner, request: GenerationRequest, max_tokens: int, admission: Charges
) -> AsyncIterator[Delivery]:
    """Inside the block the request's jobs run; leaving it cancels those that still do.

    `max_tokens`: how many tokens may be unread. The tokens that were generated are charged.
    """
    job = request.jobs[0]
    inbox = Inbox(max_tokens)
    detokenizing = Tally("detokenize")
    late = DeadlineExceeded("the answer was not complete in time")
    remaining_s = max(0.0, job.deadline_s - now_s())
    timer = asyncio.get_running_loop().call_later(remaining_s, inbox.fail, late)
    try:
        async with pipeline.run(request.jobs, inbox) as prompts:
            pairs = zip(request.jobs, prompts, strict=True)
            choices = [choice for pair in pairs for choice in request.make_choices(*pair)]
            delivery = Delivery(prompts, choices, inbox, detokenizing, job.card.block_size)
            with _charged(delivery, job, admission):
                yield delivery
    finally:
        timer.cancel()
        detokenizing.record({REQUEST_ID: job.request_id})


@contextmanager
def _charged(delivery: Delivery, job: PromptJob, admission: Charges) -> Iterator[None]:
    """Charge the tenant when the block ends.

    A response that failed on our side before its first token is not charged.
    """
    is_ours = False
    try:
        yield
    except TokenMeshError as error:
        is_ours = not isinstance(error, Cancelled)
        raise
    finally:
        if not is_ours or any(choice.num_tokens for choice in delivery.choices):
            admission.charge(job.tenant, job.card.requested_name, [delivery.usage()])
