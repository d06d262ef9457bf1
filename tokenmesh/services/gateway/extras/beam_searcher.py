"""BeamSearcher: runs a beam search on the mesh and delivers its results like streams.

A step generates one token of every open beam with streams of one token. They are placed together
where the prefix is cached, so a step computes little more than its new tokens. When a worker dies
its streams migrate like any others.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

from tokenmesh.services.gateway.extras.beam_search import Beam, BeamSearch
from tokenmesh.services.gateway.generation.inbox import Inbox, Output
from tokenmesh.services.gateway.generation.request import BeamOptions, Prompt, PromptJob
from tokenmesh.services.gateway.mesh.stages import Stages
from tokenmesh.shared.errors import ProtocolError, TokenMeshError
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.telemetry import REQUEST_ID, span, untraced
from tokenmesh.shared.tokens import pack_ids


class BeamSearcher:
    """Runs the searches of a gateway."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    @asynccontextmanager
    async def run(self, job: PromptJob, prompt: Prompt, inbox: Inbox) -> AsyncIterator[None]:
        """Inside the block the search runs and delivers into `inbox`; leaving it stops it."""
        assert job.beams is not None
        for index in range(job.n):
            inbox.connect(job.first_choice + index, _nothing_to_close)
        task = asyncio.create_task(self._search(job, job.beams, prompt, inbox))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _search(
        self, job: PromptJob, options: BeamOptions, prompt: Prompt, inbox: Inbox
    ) -> None:
        try:
            await self._deliver(job, options, prompt, inbox)
        except TokenMeshError as error:
            inbox.fail(error)
        # After a defect the client must not wait for its deadline.
        except Exception:
            inbox.fail(TokenMeshError("internal error"))
            raise

    async def _deliver(
        self, job: PromptJob, options: BeamOptions, prompt: Prompt, inbox: Inbox
    ) -> None:
        search = BeamSearch(options, prompt.num_tokens, prompt.max_tokens)
        attributes: dict[str, str | int] = {
            REQUEST_ID: job.request_id,
            "tokenmesh.beam_width": options.width,
        }
        cached_tokens: int | None = None
        with span("beam_search", attributes) as current:
            num_steps = 0
            while not search.is_over:
                # The first step shows where the prompt's time went; the others are like each other.
                with untraced() if num_steps else nullcontext():
                    outputs = await self._step(job, options, prompt, search.open)
                if num_steps == 0:
                    cached_tokens = outputs[0].cached_tokens
                search.advance([_entry_of(output) for output in outputs])
                num_steps += 1
            current.set_attribute("tokenmesh.steps", num_steps)
        answers, count = search.answers(), job.sampling.logprobs
        if len(answers) < options.width:
            raise ProtocolError("a worker sent fewer candidate tokens than a beam search requested")
        inbox.complete(
            (job.first_choice + index, _output_of(beam, count, cached_tokens))
            for index, beam in enumerate(answers)
        )

    async def _step(
        self, job: PromptJob, options: BeamOptions, prompt: Prompt, beams: Sequence[Beam]
    ) -> list[Output]:
        """The next token of each beam, with its candidates."""
        candidates = min(options.num_candidates, job.card.vocab_size)
        sampling = SamplingParams(
            seed=0, max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=candidates
        )
        one_step = replace(job, sampling=sampling, n=len(beams), first_choice=0, budget=None)
        prompts = [_after(prompt, beam) for beam in beams]
        inbox = Inbox(len(beams) * 2)
        outputs: dict[int, Output] = {}
        async with self._stages.step(one_step, prompts, inbox):
            while len(outputs) < len(beams):
                outputs |= {index: each for index, each in await inbox.get() if each.token_ids}
        return [outputs[index] for index in range(len(beams))]


def _after(prompt: Prompt, beam: Beam) -> Prompt:
    return replace(
        prompt,
        packed_ids=prompt.packed_ids + pack_ids(beam.token_ids),
        num_tokens=prompt.num_tokens + len(beam.token_ids),
        max_tokens=1,
    )


def _entry_of(output: Output) -> TokenLogprobs:
    if not output.logprobs:
        raise ProtocolError("a worker sent no log-probabilities for a beam search")
    return output.logprobs[0]


def _output_of(beam: Beam, num_logprobs: int | None, cached_tokens: int | None) -> Output:
    logprobs = None
    if num_logprobs is not None:
        logprobs = [
            TokenLogprobs(
                entry.token_id,
                entry.logprob,
                entry.rank,
                entry.top_ids[:num_logprobs],
                entry.top_logprobs[:num_logprobs],
            )
            for entry in beam.logprobs
        ]
    return Output(
        token_ids=list(beam.token_ids),
        logprobs=logprobs,
        finish=beam.finish,
        stop_token=beam.stop_token,
        cached_tokens=cached_tokens,
    )


def _nothing_to_close() -> None:
    """A step closes its own streams."""
