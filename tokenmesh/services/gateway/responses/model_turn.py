"""ModelTurn: one generation of a response, from its prompt to the last of what the model says."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.inbox import Inbox
from tokenmesh.services.gateway.generation.prompt_job import Prompt, PromptJob
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.responses.job_of_turn import (
    prompt_of,
    recorded_prompt,
    resumed,
)
from tokenmesh.services.gateway.responses.records import Flushed, Portion, Prompted
from tokenmesh.services.gateway.responses.replay import Replay
from tokenmesh.shared.telemetry import REQUEST_ID, Tally


@dataclass(frozen=True, slots=True)
class Flush:
    """What came at one time."""

    pieces: list[OutputChunk]
    portions: list[Portion]
    recorded: Flushed | None = None
    """Where it comes from when it is not new."""


class ModelTurn:
    """A turn that has its prompt. Use `open_turn`."""

    def __init__(
        self, pipeline: Pipeline, job: PromptJob, steps: Replay, delivery: Delivery, inbox: Inbox
    ) -> None:
        self.delivery = delivery
        self.token_ids: list[int] = []
        self._pipeline = pipeline
        self._job = job
        self._steps = steps
        self._inbox = inbox

    async def flushes(self, recorded: Prompted | None) -> AsyncGenerator[Flush, None]:
        """First what is recorded; after its last token the mesh goes on. Read to its end."""
        delivery = self.delivery
        if recorded is None:
            async for flush in self._live():
                yield flush
            return
        while not delivery.is_complete and (again := self._steps.recorded(Flushed)) is not None:
            yield self._push(again.portions, again)
        if not delivery.is_complete:
            job = resumed(self._job, recorded, self.token_ids)
            async with self._pipeline.run(job, self._inbox):
                async for flush in self._live():
                    yield flush

    async def _live(self) -> AsyncIterator[Flush]:
        while not self.delivery.is_complete:
            outputs = await self.delivery.receive()
            yield self._push([Portion.of(output) for _, output in outputs])

    def _push(self, portions: list[Portion], recorded: Flushed | None = None) -> Flush:
        outputs = [portion.output() for portion in portions]
        for output in outputs:
            self.token_ids.extend(output.token_ids)
        index = self._job.first_choice
        pieces = self.delivery.push([(index, output) for output in outputs])
        return Flush(pieces, portions, recorded)


@asynccontextmanager
async def open_turn(
    number: int,
    ask: GenerationRequest,
    job: PromptJob,
    steps: Replay,
    pipeline: Pipeline,
    max_tokens: int,
) -> AsyncIterator[tuple[ModelTurn, Prompted | None]]:
    """The turn, and its prompt if that was recorded before. `max_tokens` may wait unread."""
    inbox = Inbox(max_tokens, reader="the journal that responses are kept in")
    detokenizing = Tally("detokenize")

    def turn_on(prompt: Prompt) -> ModelTurn:
        choices = ask.make_choices(job, prompt)
        delivery = Delivery([prompt], choices, inbox, detokenizing)
        return ModelTurn(pipeline, job, steps, delivery, inbox)

    recorded = steps.recorded(Prompted)
    try:
        if recorded is None:
            async with pipeline.run(job, inbox) as prompt:
                await steps.record(recorded_prompt(number, prompt))
                yield turn_on(prompt), None
        else:
            # Should the record hold the end of it, nothing runs that could be closed.
            inbox.connect(job.first_choice, lambda: None)
            yield turn_on(prompt_of(recorded)), recorded
    finally:
        detokenizing.record({REQUEST_ID: job.request_id})
