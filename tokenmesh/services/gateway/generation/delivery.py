"""Delivery: all prompts of a response through the pipeline, and what they bring as pieces."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

from tokenmesh.services.gateway.generation.choice import Choice
from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.generation.prompt_job import Prompt, PromptJob
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.mesh.session import Output
from tokenmesh.services.gateway.openai.shapes import Usage, usage_of
from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import Cancelled, DeadlineExceeded, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, Tally


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
        self._block_size = block_size
        self.prompts = prompts
        self.choices = choices
        self._inbox = inbox
        self._detokenizing = detokenizing
        self._num_open = len(choices)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    def usage(self) -> Usage:
        """Tokens so far; final when `is_complete`."""
        cached = [choice.cached_tokens for choice in self._first_choices()]
        return usage_of(
            sum(prompt.num_tokens for prompt in self.prompts),
            sum(choice.num_tokens for choice in self.choices),
            _sum_known(cached),
            _sum_known(choice.reasoning_tokens for choice in self.choices),
            _sum_known(self._created(*pair) for pair in zip(self.prompts, cached, strict=True)),
        )

    def _created(self, prompt: Prompt, cached_tokens: int | None) -> int | None:
        """Tokens of the prompt's full blocks that were not in the prefix cache before."""
        if not self._block_size or cached_tokens is None:
            return None
        in_blocks = prompt.num_tokens - prompt.num_tokens % self._block_size
        return max(0, in_blocks - cached_tokens)

    def _first_choices(self) -> Sequence[Choice]:
        """Of each prompt: the others find its blocks in the cache and would hide the truth."""
        return self.choices[:: len(self.choices) // len(self.prompts)]

    async def pieces(self) -> AsyncIterator[list[OutputChunk]]:
        """Everything that arrived since the last time, until every choice has ended.

        Raises what made it impossible to go on.
        """
        while self._num_open:
            pieces = self.push(await self.receive())
            if pieces:
                yield pieces

    async def receive(self) -> Sequence[tuple[int, Output]]:
        """What the streams brought, by choice. Raises what made it impossible to go on."""
        return await self._inbox.get()

    def abort(self) -> None:
        """End every choice that has not ended, with the tokens that are there."""
        for choice in self.choices:
            if choice.finish_reason is None:
                self._inbox.put(choice.index, Output(finish="abort"))

    def push(self, outputs: Sequence[tuple[int, Output]]) -> list[OutputChunk]:
        """What `receive` gave, or once gave to somebody else, as pieces."""
        with self._detokenizing:
            return list(self._push(outputs))

    def _push(self, outputs: Sequence[tuple[int, Output]]) -> Iterator[OutputChunk]:
        for index, output in outputs:
            piece = self.choices[index].push(output)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                self._num_open -= 1
                self._inbox.close(index)
            yield piece


@asynccontextmanager
async def deliver(
    pipeline: Pipeline,
    jobs: Sequence[PromptJob],
    make_choices: Callable[[PromptJob, Prompt], list[Choice]],
    max_tokens: int,
    admission: Admission,
) -> AsyncIterator[Delivery]:
    """Inside the block the jobs run; leaving it cancels what still does.

    `max_tokens`: how many tokens may wait to be read. What was generated until then is charged.
    """
    inbox = Inbox(max_tokens)
    detokenizing = Tally("detokenize")
    block_size = jobs[0].card.block_size
    late = DeadlineExceeded("the answer was not complete in time")
    remaining_s = max(0.0, jobs[0].deadline_s - now_s())
    timer = asyncio.get_running_loop().call_later(remaining_s, inbox.fail, late)
    try:
        if len(jobs) == 1:
            async with pipeline.run(jobs[0], inbox) as prompt:
                choices = make_choices(jobs[0], prompt)
                delivery = Delivery([prompt], choices, inbox, detokenizing, block_size)
                with _charged(delivery, jobs[0], admission):
                    yield delivery
        else:
            async with _run_all(pipeline, jobs, inbox) as prompts:
                pairs = zip(jobs, prompts, strict=True)
                choices = [choice for pair in pairs for choice in make_choices(*pair)]
                delivery = Delivery(prompts, choices, inbox, detokenizing, block_size)
                with _charged(delivery, jobs[0], admission):
                    yield delivery
    finally:
        timer.cancel()
        detokenizing.record({REQUEST_ID: jobs[0].request_id})


@contextmanager
def _charged(delivery: Delivery, job: PromptJob, admission: Admission) -> Iterator[None]:
    """However the block ends, but for a failure of ours that left the client without a token."""
    is_ours = False
    try:
        yield
    except TokenMeshError as error:
        is_ours = not isinstance(error, Cancelled)
        raise
    finally:
        if not is_ours or any(choice.num_tokens for choice in delivery.choices):
            admission.charge(job.tenant, job.card.name, [delivery.usage()])


@asynccontextmanager
async def _run_all(
    pipeline: Pipeline, jobs: Sequence[PromptJob], inbox: Inbox
) -> AsyncIterator[Sequence[Prompt]]:
    """All at once. The block begins before there is a worker for each of them: what the first ones
    bring must be read while others wait for room."""
    tasks: list[asyncio.Task[Prompt] | asyncio.Task[None]] = []
    try:
        preparing = [asyncio.create_task(pipeline.prepare(job)) for job in jobs]
        tasks += preparing
        prompts = await asyncio.gather(*preparing)
        for index, job in enumerate(jobs):
            holder = asyncio.create_task(_hold(pipeline, job, prompts, index, inbox))
            holder.add_done_callback(partial(_pass_on, inbox))
            tasks.append(holder)
        yield prompts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _hold(
    pipeline: Pipeline,
    job: PromptJob,
    prompts: list[Prompt],
    index: int,
    inbox: Inbox,
) -> None:
    """Keep one job's block open until this is cancelled; its prompt learns of its worker."""
    async with pipeline.generate(job, prompts[index], inbox) as prompts[index]:
        await asyncio.Event().wait()


def _pass_on(inbox: Inbox, holder: asyncio.Task[None]) -> None:
    error = None if holder.cancelled() else holder.exception()
    if error is not None:
        unknown = TokenMeshError(f"a prompt failed: {error!r}")
        inbox.fail(error if isinstance(error, TokenMeshError) else unknown)


def _sum_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
