"""The path of a prompt: tokenize -> encode -> place -> generate -> deliver.

The steps are in stages.py. Any of them may be repeated, by another process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial

from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import Prompt, PromptJob
from tokenmesh.services.gateway.core.mesh.stages import Stages
from tokenmesh.shared.errors import InvalidInput, NotFound, TokenMeshError

BeamSearch = Callable[[PromptJob, Prompt, Inbox], AbstractAsyncContextManager[None]]


class Pipeline:
    """Runs jobs on the mesh."""

    def __init__(self, stages: Stages, search: BeamSearch) -> None:
        """`search` runs the jobs that want a beam search."""
        self._stages = stages
        self._search = search

    @asynccontextmanager
    async def run(self, jobs: Sequence[PromptJob], inbox: Inbox) -> AsyncIterator[Sequence[Prompt]]:
        """Inside the block workers deliver into `inbox`; leaving it cancels what still runs.

        Yields the prompt of each job. With several jobs the block begins before each has a worker,
        because the output of the first ones must be read while others are queued.
        """
        if len(jobs) == 1:
            async with self._generate(jobs[0], await self._prepare(jobs[0]), inbox) as prompt:
                yield [prompt]
            return
        tasks: list[asyncio.Task[Prompt] | asyncio.Task[None]] = []
        try:
            preparing = [asyncio.create_task(self._prepare(job)) for job in jobs]
            tasks += preparing
            prompts = await asyncio.gather(*preparing)
            for index, job in enumerate(jobs):
                running = asyncio.create_task(self._keep_running(job, prompts, index, inbox))
                running.add_done_callback(partial(_pass_error, inbox))
                tasks.append(running)
            yield prompts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def tokenize(self, job: PromptJob) -> Prompt:
        """The prompt as ids. Errors name its place in the client's body."""
        try:
            return await self._stages.tokenize(job)
        except InvalidInput as error:
            raise error.within(job.path) from error

    async def _prepare(self, job: PromptJob) -> Prompt:
        """Tokenize and encode; once more if the pixels have expired between the two."""
        try:
            prompt = await self._stages.tokenize(job)
            try:
                prompt = await self._stages.encode(job, prompt)
            except NotFound:
                prompt = await self._stages.encode(job, await self._stages.tokenize(job))
        except InvalidInput as error:
            raise error.within(job.path) from error
        return prompt

    @asynccontextmanager
    async def _generate(
        self, job: PromptJob, prompt: Prompt, inbox: Inbox
    ) -> AsyncIterator[Prompt]:
        """Yields the prompt with the worker on which it was placed."""
        if job.on_prepared is not None:
            job.on_prepared()
        if job.beams is not None:
            async with self._search(job, prompt, inbox):
                yield prompt
            return
        placed = await self._stages.place(job, prompt)
        async with self._stages.generate(job, prompt, placed, inbox):
            yield replace(prompt, worker_id=placed.worker_id)

    async def _keep_running(
        self, job: PromptJob, prompts: list[Prompt], index: int, inbox: Inbox
    ) -> None:
        """Run one of several jobs until cancelled; its prompt is replaced by that with a worker."""
        async with self._generate(job, prompts[index], inbox) as prompts[index]:
            await asyncio.Event().wait()


def _pass_error(inbox: Inbox, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        unknown = TokenMeshError(f"a prompt failed: {error!r}")
        inbox.fail(error if isinstance(error, TokenMeshError) else unknown)
