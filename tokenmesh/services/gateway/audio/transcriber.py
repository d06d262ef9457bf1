"""Transcriber: a stored recording becomes transcripts of its clips, a few clips at a time.

The first clip decides about the language. All usage is charged when the recording ends.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from math import exp
from typing import Final

import msgspec

from tokenmesh.services.gateway.audio.prompts import SpeechTask, fallback_language, tokenized
from tokenmesh.services.gateway.audio.segments import Transcript
from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.choice import TextOptions
from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.generation.delivery import Delivery, deliver
from tokenmesh.services.gateway.generation.parsing import ModelText
from tokenmesh.services.gateway.generation.request import (
    ChunkOptions,
    GenerationRequest,
    Head,
    PromptJob,
)
from tokenmesh.services.gateway.generation.usage import Meter, Usage, usage_of
from tokenmesh.services.gateway.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.services.gateway.tenancy.tenant import Tenant
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import Cancelled, InvalidInput, NotFound, TokenMeshError, Unavailable
from tokenmesh.shared.ids import BlobKey, RequestId
from tokenmesh.shared.messages import AudioPrepared, PrepareAudio
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.subjects import tokenize
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import pack_ids

_MARGIN_S: Final = 60
_PLAIN: Final = TextOptions(skip_special_tokens=True)


@dataclass(slots=True, kw_only=True)
class Recording:
    """One recording to transcribe, and how."""

    job: PromptJob
    """Its prompt stands for those of all clips."""
    head: Head
    text: ModelText
    task: SpeechTask
    source: BlobKey
    rate: int = 0
    """Of raw samples; 0: the source is a file."""
    needs_logprobs: bool = False
    needs_no_speech: bool = False
    """Whether each clip's probability of no speech is wanted."""
    detects_language: bool = False
    duration_s: float = 0.0
    """Known with the first clips."""


@dataclass(slots=True)
class _Charges:
    """Usage of all prompts of a recording, charged as one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def charge(self, tenant: Tenant, model: str, usages: Iterable[Usage], name: str = "") -> None:
        for usage in usages:
            self.prompt_tokens += usage.prompt_tokens
            self.completion_tokens += usage.completion_tokens
            details = usage.prompt_tokens_details
            self.cached_tokens += 0 if details is None else details.cached_tokens


@dataclass(slots=True)
class Transcriber:
    """Runs one recording; `charges` and `audio_tokens` grow meanwhile."""

    recording: Recording
    calls: ServiceCalls
    pipeline: Pipeline
    admission: Admission
    blobs: Blobs
    settings: GatewaySettings
    meter: Meter
    charges: _Charges = field(default_factory=_Charges)
    audio_s: float = 0.0
    """Of all clips so far."""
    audio_tokens: int = 0
    """States of the encoder, of all clips so far."""

    async def run(self, context: RequestContext) -> AsyncGenerator[tuple[Transcript, bool], None]:
        """Transcripts as they grow, in the order of the clips; True: the clip is complete."""
        job, first = self.recording.job, 0
        try:
            while True:
                prepared = await self._prepare(first)
                if not first:
                    self.recording.duration_s = prepared.duration_s
                    most = job.tenant.max_concurrent or self.settings.audio_clips
                    await context.widen(1, max(1, min(len(prepared.clips), most)))
                transcripts = [Transcript(clip) for clip in prepared.clips]
                await self._probe(transcripts, context)
                most = self._most_at_a_time()
                for start in range(0, len(transcripts), most):
                    async for each in self._transcribe(transcripts[start : start + most]):
                        yield each
                first += len(prepared.clips)
                if first >= prepared.total or not prepared.clips:
                    return
        finally:
            self._charge()

    def _most_at_a_time(self) -> int:
        most = self.recording.job.tenant.max_concurrent
        return self.settings.audio_clips if most is None else min(most, self.settings.audio_clips)

    def _charge(self) -> None:
        """Nothing is charged for a recording that failed before its first token."""
        if self.charges.completion_tokens:
            job, charges = self.recording.job, self.charges
            usage = usage_of(
                charges.prompt_tokens + self.audio_tokens,
                charges.completion_tokens,
                charges.cached_tokens,
            )
            self.admission.charge(job.tenant, job.card.name, [usage])
            self.meter.count_audio(self.audio_s)

    async def _prepare(self, first: int) -> AudioPrepared:
        """Raises InvalidInput and its subclasses. Each part of a recording has a request's time."""
        recording = self.recording
        deadline_s = now_s() + self.settings.request_timeout_s
        job = recording.job = replace(recording.job, deadline_s=deadline_s)
        if first:
            await self.blobs.renew(recording.source, stored_s(self.settings))
        message = PrepareAudio(
            request_id=job.request_id,
            model=job.card.name,
            source=recording.source,
            rate=recording.rate,
            first=first,
            count=self.settings.audio_clips,
            tenant=job.tenant.name,
        )
        with span("prepare_audio", {REQUEST_ID: job.request_id}) as current:
            try:
                prepared = await self.calls.request(
                    tokenize(job.card.name),
                    message,
                    AudioPrepared,
                    timeout_s=self.settings.audio_timeout_s,
                    deadline_s=job.deadline_s,
                    hedge_after_s=self.settings.audio_timeout_s / 2,
                )
            except NotFound as error:
                raise Unavailable(f"the recording is gone: {error.message}") from error
            except InvalidInput as error:
                raise type(error)(f"file: {error.message}", param="file") from error
            current.set_attribute("tokenmesh.audio_s", prepared.duration_s)
            current.set_attribute("tokenmesh.clips", len(prepared.clips))
        self.audio_s += sum(clip.end_s - clip.start_s for clip in prepared.clips)
        self.audio_tokens = round(self.audio_s / recording.task.facts.timestamp_s)
        return prepared

    async def _probe(self, transcripts: Sequence[Transcript], context: RequestContext) -> None:
        """Detect the language by one token of the first clip, and speech by one of each."""
        recording, facts = self.recording, self.recording.task.facts
        is_first = recording.detects_language and recording.task.language is None
        wanted = transcripts if recording.needs_no_speech else transcripts[:1]
        if not (is_first or recording.needs_no_speech):
            return
        try:
            languages = await self._first_tokens(wanted)
        except (Cancelled, Unavailable):
            raise
        except TokenMeshError as error:
            languages = [None] * len(wanted)
            context.warnings.append(f"the language was not detected: {error.message}")
        if is_first:
            names = {token: name for name, token in facts.languages.items()}
            language = names.get(languages[0] or -1) or fallback_language(facts)
            recording.task = replace(recording.task, language=language)

    async def _first_tokens(self, transcripts: Sequence[Transcript]) -> list[int | None]:
        """What is drawn after the start token: a language."""
        facts = self.recording.task.facts
        sampling = SamplingParams(
            seed=0,
            max_tokens=1,
            temperature=0.0,
            allowed_token_ids=sorted(facts.languages.values()) or None,
            logprobs=0,
            logprob_token_ids=[facts.no_speech_id] if facts.no_speech_id >= 0 else [],
        )
        found: list[int | None] = [None] * len(transcripts)
        jobs = [
            self._job(index, transcript, [facts.start_id], sampling, 1)
            for index, transcript in enumerate(transcripts)
        ]
        with span("detect_language", {REQUEST_ID: self.recording.job.request_id}):
            async with self._deliver(jobs) as delivery:
                async for chunks in delivery.chunks():
                    for chunk in chunks:
                        found[chunk.choice] = next(iter(chunk.token_ids), found[chunk.choice])
                        for entry in chunk.logprobs:
                            values = entry.top_logprobs
                            transcripts[chunk.choice].no_speech = exp(values[0]) if values else 0.0
        return found

    async def _transcribe(
        self, transcripts: Sequence[Transcript]
    ) -> AsyncGenerator[tuple[Transcript, bool], None]:
        recording = self.recording
        prompt = recording.task.prompt()
        sampling = msgspec.structs.replace(
            recording.job.sampling,
            speech=recording.task.rule(),
            logprobs=0 if recording.needs_logprobs else None,
        )
        jobs = [
            self._job(index, transcript, prompt, sampling, recording.job.max_tokens)
            for index, transcript in enumerate(transcripts)
        ]
        is_done = [False] * len(jobs)
        current = 0
        async with self._deliver(jobs) as delivery:
            async for chunks in delivery.chunks():
                self.meter.flush(delivery.prompts)
                for chunk in chunks:
                    _add(transcripts[chunk.choice], chunk)
                    is_done[chunk.choice] |= chunk.finish_reason is not None
                while current < len(jobs):
                    yield transcripts[current], is_done[current]
                    if not is_done[current]:
                        break
                    current += 1
            self.meter.finish(delivery.prompts, delivery.choices)

    def _deliver(self, jobs: list[PromptJob]) -> AbstractAsyncContextManager[Delivery]:
        recording = self.recording
        request = GenerationRequest(
            head=recording.head,
            jobs=tuple(jobs),
            text=recording.text,
            options=_PLAIN,
            chunks=ChunkOptions(),
            is_stream=True,
        )
        return deliver(self.pipeline, request, self.settings.max_buffered_tokens, self.charges)

    def _job(
        self,
        index: int,
        transcript: Transcript,
        prompt: list[int],
        sampling: SamplingParams,
        max_tokens: int | None,
    ) -> PromptJob:
        job = self.recording.job
        ids = pack_ids(prompt)
        return replace(
            job,
            request_id=RequestId(f"{job.request_id}-{index}"),
            prompt=IdsPrompt(token_ids=ids),
            tokenized=tokenized(prompt, transcript.clip),
            sampling=sampling,
            max_tokens=max_tokens,
            cuts_max_tokens=True,
            first_choice=index,
        )


def stored_s(settings: GatewaySettings) -> int:
    """How long a recording stays in Redis while its next part is transcribed."""
    return int(settings.request_timeout_s) + _MARGIN_S


def _add(transcript: Transcript, chunk: OutputChunk) -> None:
    transcript.token_ids += chunk.token_ids
    transcript.logprobs += chunk.logprobs
