"""ModelTurn: one generation of a response, replayed from its records and continued after them."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.apis.responses.event_log import Replay
from tokenmesh.services.gateway.apis.responses.records import Flushed, Portion, Prompted
from tokenmesh.services.gateway.core.generation.answer import GenerationServices
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery, Inbox, PromptRunner
from tokenmesh.services.gateway.core.generation.request import GenerationRequest, Prompt, PromptJob
from tokenmesh.shared.ids import SEED_BITS
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.telemetry import REQUEST_ID, Tally
from tokenmesh.shared.tokens import count_ids

_SEEDS: Final = 1 << SEED_BITS


@dataclass(frozen=True, slots=True)
class Flush:
    """Outputs that arrived together."""

    chunks: list[OutputChunk]
    portions: list[Portion]
    recorded: Flushed | None = None
    """The record that is replayed; None for new outputs."""


@dataclass(slots=True)
class ModelTurn:
    """A turn whose prompt is known. Made by `open_turn`."""

    pipeline: PromptRunner
    job: PromptJob
    replay: Replay
    delivery: Delivery
    inbox: Inbox
    _token_ids: list[int] = field(default_factory=list)

    async def flushes(self, recorded: Prompted | None) -> AsyncGenerator[Flush, None]:
        """Recorded outputs first, then those of the mesh from the last recorded token on."""
        delivery = self.delivery
        if recorded is None:
            async for flush in self._live():
                yield flush
            return
        while not delivery.is_complete and (flushed := self.replay.next(Flushed)) is not None:
            yield self._push(flushed.portions, flushed)
        if not delivery.is_complete:
            job = _resumed(self.job, recorded, self._token_ids)
            async with self.pipeline.run([job], self.inbox):
                async for flush in self._live():
                    yield flush

    async def _live(self) -> AsyncIterator[Flush]:
        while not self.delivery.is_complete:
            outputs = await self.delivery.receive()
            yield self._push([Portion.of(output) for _, output in outputs])

    def _push(self, portions: list[Portion], recorded: Flushed | None = None) -> Flush:
        outputs = [portion.output() for portion in portions]
        for output in outputs:
            self._token_ids.extend(output.token_ids)
        index = self.job.first_choice
        chunks = self.delivery.push([(index, output) for output in outputs])
        return Flush(chunks, portions, recorded)


@asynccontextmanager
async def open_turn(
    number: int,
    generation: GenerationRequest,
    job: PromptJob,
    replay: Replay,
    services: GenerationServices,
) -> AsyncIterator[tuple[ModelTurn, Prompted | None]]:
    """The turn, and its prompt if that is recorded."""
    pipeline, max_tokens = services.pipeline, services.settings.max_buffered_tokens
    inbox = Inbox(max_tokens, reader="the journal that responses are kept in")
    detokenizing = Tally("detokenize")

    def turn_on(prompt: Prompt) -> ModelTurn:
        choices = generation.make_choices(job, prompt)
        delivery = Delivery([prompt], choices, inbox, detokenizing)
        return ModelTurn(pipeline, job, replay, delivery, inbox)

    recorded = replay.next(Prompted)
    try:
        if recorded is None:
            async with pipeline.run([job], inbox) as (prompt,):
                record = Prompted(
                    turn=number,
                    packed_ids=prompt.packed_ids,
                    max_tokens=prompt.max_tokens,
                    has_media=bool(prompt.media),
                    media_tokens=dict(prompt.media_tokens),
                )
                await replay.record(record)
                yield turn_on(prompt), None
        else:
            # If the whole turn is recorded, no stream runs that could be cancelled.
            inbox.connect(job.first_choice, lambda: None)
            ids = recorded.packed_ids
            prompt = Prompt(
                packed_ids=ids,
                num_tokens=count_ids(ids),
                max_tokens=recorded.max_tokens,
                media_tokens=recorded.media_tokens,
            )
            yield turn_on(prompt), recorded
    finally:
        detokenizing.record({REQUEST_ID: job.request_id})


def job_of_turn(job: PromptJob, number: int, seed: int, deadline_s: float) -> PromptJob:
    """`seed` is that of the first turn; each turn has another one."""
    sampling = msgspec.structs.replace(job.sampling, seed=(seed + number) % _SEEDS)
    return replace(job, sampling=sampling, deadline_s=deadline_s)


def _resumed(job: PromptJob, recorded: Prompted, delivered: Sequence[int]) -> PromptJob:
    """The job after `delivered` tokens, on the recorded prompt.

    Media are fetched again: their embeddings may have expired.
    """
    job = replace(job, max_tokens=recorded.max_tokens, delivered=tuple(delivered))
    if recorded.has_media:
        return job
    prompt = IdsPrompt(token_ids=recorded.packed_ids)
    return replace(job, prompt=prompt, truncate_prompt_tokens=None)
