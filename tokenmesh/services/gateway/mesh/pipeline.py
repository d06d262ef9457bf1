"""The path of a prompt: tokenize -> encode -> place -> generate -> deliver.

What each step does is in stages.py. Any step may be done again, by another process.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tokenmesh.services.gateway.extras.beam_searcher import BeamSearcher
from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.generation.prompt_job import Prompt, PromptJob
from tokenmesh.services.gateway.mesh.stages import Stages
from tokenmesh.shared.errors import InvalidInput, NotFound


class Pipeline:
    """Takes jobs to workers."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._searcher = BeamSearcher(stages)

    @asynccontextmanager
    async def run(self, job: PromptJob, inbox: Inbox) -> AsyncIterator[Prompt]:
        """Inside the block workers deliver into `inbox`; leaving it cancels what still runs."""
        async with self.generate(job, await self.prepare(job), inbox) as prompt:
            yield prompt

    async def tokenize(self, job: PromptJob) -> Prompt:
        """The prompt as ids; errors name its place in the client's body."""
        try:
            return await self._stages.tokenize(job)
        except InvalidInput as error:
            raise error.within(job.path) from error

    async def prepare(self, job: PromptJob) -> Prompt:
        """Tokenize and encode; pixels that have expired in between are made again, once."""
        try:
            prompt = await self._stages.tokenize(job)
            try:
                prompt = await self._stages.encode(job, prompt)
            except NotFound:
                prompt = await self._stages.encode(job, await self._stages.tokenize(job))
        except InvalidInput as error:
            raise error.within(job.path) from error
        return prompt if job.embeds is None else replace(prompt, media=(job.embeds,))

    @asynccontextmanager
    async def generate(self, job: PromptJob, prompt: Prompt, inbox: Inbox) -> AsyncIterator[Prompt]:
        """The rest of `run`: the prompt with the worker that took it."""
        job.on_prepared()
        if job.beams is not None:
            async with self._searcher.run(job, job.beams, prompt, inbox):
                yield prompt
            return
        placed = await self._stages.place(job, prompt)
        async with self._stages.generate(job, prompt, placed, inbox):
            yield replace(prompt, worker_id=placed.worker_id)
