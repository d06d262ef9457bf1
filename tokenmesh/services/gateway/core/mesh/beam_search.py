"""Beam search: BeamSearch selects continuations (no I/O), BeamSearcher generates them in the mesh.

vLLM's rules: the 2 * width most likely tokens of every beam are candidates, an end token completes
the beam, and the `width` best of the others continue. Beams are compared by the sum of the model's
own log-probabilities, complete ones by that sum divided by length ** length_penalty.

A step generates one token of every open beam with streams of one token. They are placed together
where the prefix is cached, so a step computes little more than its new tokens. When a worker dies
its streams migrate like any others.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace

from tokenmesh.services.gateway.core.generation.chunk import Output
from tokenmesh.services.gateway.core.generation.delivery import Inbox
from tokenmesh.services.gateway.core.generation.request import BeamOptions, Prompt, PromptJob
from tokenmesh.services.gateway.core.mesh.stages import Stages
from tokenmesh.shared.errors import ProtocolError, TokenMeshError
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokens import FinishReason, TokenLogprobs
from tokenmesh.shared.telemetry import REQUEST_ID, span, untraced
from tokenmesh.shared.tokens import pack_ids


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation of the prompt."""

    token_ids: tuple[int, ...] = ()
    """Includes the token that ended it."""
    cumulative: float = 0.0
    """Sum of log-probabilities."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason = "length"
    stop_token: int | None = None

    def score(self, num_prompt: int, length_penalty: float) -> float:
        """For comparing complete beams; the prompt counts towards the length, as in vLLM."""
        length = num_prompt + len(self.token_ids) - (self.finish == "stop")
        return normalized(self.cumulative, length, length_penalty)

    def grown(self, chosen: TokenLogprobs) -> "Beam":
        """The beam with one more token."""
        return Beam(
            (*self.token_ids, chosen.token_id),
            self.cumulative + chosen.logprob,
            (*self.logprobs, chosen),
        )


class BeamSearch:
    """The state of one search."""

    def __init__(self, options: BeamOptions, num_prompt: int, max_tokens: int) -> None:
        self.open: list[Beam] = [Beam()]
        """Beams that continue, best first; all have the same length."""
        self._options = options
        self._num_prompt = num_prompt
        self._max_tokens = max_tokens
        self._complete: list[Beam] = []

    @property
    def is_over(self) -> bool:
        """Return whether no further token can change the answers."""
        if not self.open or len(self.open[0].token_ids) >= self._max_tokens:
            return True
        if len(self._complete) < self._options.width:
            return False
        worst = self._score(self._best_complete()[-1])
        return all(self._most(beam) <= worst for beam in self.open)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Extend the open beams by one token; `entries` are theirs, in order."""
        candidates: list[tuple[float, Beam, TokenLogprobs]] = []
        for beam, entry in zip(self.open, entries, strict=True):
            for chosen in _choices(entry):
                total = beam.cumulative + chosen.logprob
                if chosen.token_id in self._options.end_ids:
                    self._complete.append(replace(beam.grown(chosen), finish="stop"))
                elif (token_id := chosen.token_id) in self._options.stop_ids:
                    ended = replace(beam.grown(chosen), finish="stop", stop_token=token_id)
                    self._complete.append(ended)
                else:
                    candidates.append((total, beam, chosen))
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        best = candidates[: self._options.width]
        self.open = [beam.grown(chosen) for _, beam, chosen in best]

    def answers(self) -> list[Beam]:
        """The `width` best beams, best first; open ones count as cut by length."""
        found = [*self._complete, *self.open]
        return sorted(found, key=self._score, reverse=True)[: self._options.width]

    def _best_complete(self) -> list[Beam]:
        """Drop all complete beams but the `width` best."""
        best = sorted(self._complete, key=self._score, reverse=True)
        self._complete = best[: self._options.width]
        return self._complete

    def _score(self, beam: Beam) -> float:
        return beam.score(self._num_prompt, self._options.length_penalty)

    def _most(self, beam: Beam) -> float:
        """An upper bound of the scores of its continuations: sums only fall, lengths only grow."""
        penalty = self._options.length_penalty
        longest = self._num_prompt + self._max_tokens
        shortest = self._num_prompt + len(beam.token_ids)
        return normalized(beam.cumulative, longest if penalty > 0 else shortest, penalty)


def normalized(cumulative: float, length: int, length_penalty: float) -> float:
    """A sum of log-probabilities divided by length ** length_penalty."""
    return cumulative / float(length**length_penalty)


def _choices(entry: TokenLogprobs) -> Iterator[TokenLogprobs]:
    """One entry for each candidate token, as if it had been drawn."""
    ranked = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
    for rank, (token_id, logprob) in ranked:
        yield TokenLogprobs(token_id, logprob, rank, entry.top_ids, entry.top_logprobs)


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
