"""Transcriber: a stored recording becomes transcripts of its clips, a few clips at a time.

The first clip decides about the language. All usage is charged when the recording ends.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.apis.audio.clip_passes import RecordingRun
from tokenmesh.services.gateway.apis.audio.prompts import fallback_language
from tokenmesh.services.gateway.apis.audio.segments import Transcript, compression_ratio, text_ids
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    Cancelled,
    InvalidInput,
    NotFound,
    ProtocolError,
    TokenMeshError,
    Unavailable,
)
from tokenmesh.shared.messages import AudioPrepared, PrepareAudio
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import unpack_ids

_MAX_NO_SPEECH: Final = 0.6
"""With a larger probability of no speech implausible tokens are dropped."""

_MIN_LOGPROB: Final = -1.0
"""Tokens of a clip with a smaller mean log-probability are implausible."""

_MAX_COMPRESSION: Final = 2.4
"""A clip whose text has a larger compression ratio repeats itself."""

_MARGIN_S: Final = 60
_ASKED: Final = ("prompt", "keywords")
"""Fields of a request that a tokenizer writes into a prompt."""


@dataclass(slots=True)
class Transcriber(RecordingRun):
    """Runs one recording; `audio_tokens` grow meanwhile, and the charges of its passes."""

    audio_s: float = 0.0
    """This is the length of all clips so far."""
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
                    part = transcripts[start : start + most]
                    # closed before the charge: a generator that is left would run on meanwhile
                    async with aclosing(self._tried(part, context)) as growing:
                        async for each in growing:
                            yield each
                    if self.recording.needs_words:
                        await self.passes.align(part)
                first += len(prepared.clips)
                if first >= prepared.total or not prepared.clips:
                    return
        finally:
            self._charge(self.audio_tokens, self.audio_s)

    def _most_at_a_time(self) -> int:
        most = self.recording.job.tenant.max_concurrent
        return self.settings.audio_clips if most is None else min(most, self.settings.audio_clips)

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
            ask=recording.task.ask,
        )
        with span("prepare_audio", {REQUEST_ID: job.request_id}) as current:
            try:
                prepared = await self._prepare_audio(message, AudioPrepared)
            except NotFound as error:
                raise Unavailable(f"the recording is no longer stored: {error.message}") from error
            except InvalidInput as error:
                if error.param in _ASKED:
                    raise
                raise type(error)(f"file: {error.message}", param="file") from error
            current.set_attribute("tokenmesh.audio_s", prepared.duration_s)
            current.set_attribute("tokenmesh.clips", len(prepared.clips))
        self.audio_s += sum(clip.end_s - clip.start_s for clip in prepared.clips)
        if recording.task.ask is None:
            self.audio_tokens = round(self.audio_s / recording.task.facts.timestamp_s)
            return prepared
        self.audio_tokens += sum(clip.num_tokens for clip in prepared.clips)
        self._take_prompt(tuple(unpack_ids(prepared.prompt_ids)))
        return prepared

    def _take_prompt(self, ids: tuple[int, ...]) -> None:
        task = self.recording.task
        if ids.count(task.facts.embed_id) != 1:
            raise ProtocolError("the prompt has no place for the clip, or several")
        self.recording.task = replace(task, asked_ids=ids)

    async def _probe(self, transcripts: Sequence[Transcript], context: RequestContext) -> None:
        """Detect the language by one token of the first clip, and speech by one of each."""
        recording, facts = self.recording, self.recording.task.facts
        is_first = recording.detects_language and recording.task.language is None
        wanted = transcripts if recording.needs_no_speech else transcripts[:1]
        if not (is_first or recording.needs_no_speech):
            return
        try:
            languages = await self.passes.first_tokens(wanted)
        except (Cancelled, Unavailable):
            raise
        except TokenMeshError as error:
            languages = [None] * len(wanted)
            context.warnings.append(f"the language was not detected: {error.message}")
        if is_first:
            names = {token: name for name, token in facts.languages.items()}
            language = names.get(languages[0] or -1) or fallback_language(facts)
            recording.task = replace(recording.task, language=language)

    async def _tried(
        self, transcripts: Sequence[Transcript], context: RequestContext
    ) -> AsyncGenerator[tuple[Transcript, bool], None]:
        """Transcripts as they grow; only those that are complete, where they may change."""
        first, *others = self.recording.temperatures
        is_final = not others and not self.recording.drops_silence
        async with aclosing(self._transcribe(transcripts, first)) as growing:
            async for each in growing:
                if is_final:
                    yield each
        if is_final:
            return
        try:
            await self._retry(transcripts, others)
        except Cancelled:
            raise
        except TokenMeshError as error:
            context.warnings.append(f"implausible clips were not drawn again: {error.message}")
        await self._drop_silence(transcripts, context)
        for transcript in transcripts:
            yield transcript, True

    async def _retry(self, transcripts: Sequence[Transcript], temperatures: list[float]) -> None:
        """Draw implausible transcripts again; one that cannot be stays as it is."""
        doubtful = transcripts
        for temperature in temperatures:
            doubtful = await self._doubtful(doubtful)
            if not doubtful:
                return
            self.meter.count_audio_retries(len(doubtful))
            drawn = [Transcript(each.clip) for each in doubtful]
            async for _ in self._transcribe(drawn, temperature):
                pass
            for each, new in zip(doubtful, drawn, strict=True):
                each.replace_tokens(new)

    async def _drop_silence(
        self, transcripts: Sequence[Transcript], context: RequestContext
    ) -> None:
        """Leave nothing of what the model made up about clips in which it hears no speech."""
        if not self.recording.drops_silence:
            return
        try:
            unlikely = await self._unlikely(transcripts)
        except (Cancelled, Unavailable):
            raise
        except TokenMeshError as error:
            context.warnings.append(f"clips were not checked for silence: {error.message}")
            return
        for each in unlikely:
            if (each.no_speech or 0.0) > _MAX_NO_SPEECH:
                each.token_ids = []

    async def _unlikely(self, transcripts: Sequence[Transcript]) -> list[Transcript]:
        """Transcripts whose tokens are implausible; of those it is known whether there is speech,
        where the model can tell."""
        least = _MIN_LOGPROB
        unlikely = [each for each in transcripts if each.logprob < least]
        unknown = [each for each in unlikely if each.no_speech is None]
        if unknown and self.recording.task.facts.no_speech_id >= 0:
            await self.passes.first_tokens(unknown)
        return unlikely

    async def _doubtful(self, transcripts: Sequence[Transcript]) -> list[Transcript]:
        """Those to be drawn again: unlikely ones, but not of silence, and those that repeat."""
        recording = self.recording
        facts, decode = recording.task.facts, recording.text.vocabulary.decode
        unlikely = {id(each) for each in await self._unlikely(transcripts)}

        def is_doubtful(transcript: Transcript) -> bool:
            if id(transcript) in unlikely:
                return (transcript.no_speech or 0.0) <= _MAX_NO_SPEECH
            text = decode(text_ids(transcript.token_ids, facts))
            return compression_ratio(text) > _MAX_COMPRESSION

        return [each for each in transcripts if is_doubtful(each)]

    async def _transcribe(
        self, transcripts: Sequence[Transcript], temperature: float
    ) -> AsyncGenerator[tuple[Transcript, bool], None]:
        recording = self.recording
        task = recording.task
        for transcript in transcripts:
            transcript.temperature = temperature
        sampling = msgspec.structs.replace(
            recording.job.sampling,
            temperature=temperature,
            speech=recording.task.rule(),
            logprobs=0 if recording.needs_logprobs else None,
        )
        jobs = [
            self.passes.job(
                index,
                transcript,
                task.prompt(transcript.clip),
                sampling,
                task.max_tokens(transcript.clip, recording.job.max_tokens),
            )
            for index, transcript in enumerate(transcripts)
        ]
        is_done = [False] * len(jobs)
        current = 0
        async with self.passes.deliver(jobs) as delivery:
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


def stored_s(settings: GatewaySettings) -> int:
    """Return how long a recording stays in Redis while its next part is transcribed."""
    return int(settings.request_timeout_s) + _MARGIN_S


def _add(transcript: Transcript, chunk: OutputChunk) -> None:
    transcript.token_ids += chunk.token_ids
    transcript.logprobs += chunk.logprobs
