"""ClipPasses: passes of a model over clips of one recording, each a request to the mesh.

RecordingRun is what the two transcribers share.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from math import exp
from typing import Final, TypeVar

from tokenmesh.services.gateway.apis.audio.prompts import SpeechTask, tokenized
from tokenmesh.services.gateway.apis.audio.segments import Transcript
from tokenmesh.services.gateway.core.generation.choice import TextOptions
from tokenmesh.services.gateway.core.generation.delivery import Delivery, PromptRunner, deliver
from tokenmesh.services.gateway.core.generation.parsing import ModelText
from tokenmesh.services.gateway.core.generation.request import (
    ChunkOptions,
    GenerationRequest,
    Head,
    PromptJob,
)
from tokenmesh.services.gateway.core.generation.usage import Meter, Usage, usage_of
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.tenancy.admission import Admission
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import BlobKey, RequestId
from tokenmesh.shared.messages import Message
from tokenmesh.shared.messages.media import AUDIO
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.subjects import tokenize
from tokenmesh.shared.telemetry import REQUEST_ID, span
from tokenmesh.shared.tokens import pack_ids

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
    """This is the rate of raw samples; 0: the source is a file."""
    temperatures: tuple[float, ...] = (0.0,)
    """These are the temperatures of a clip, one after another until its transcript is plausible."""
    needs_logprobs: bool = False
    needs_words: bool = False
    """It tells whether the time of each token is wanted."""
    needs_no_speech: bool = False
    """It tells whether each clip's probability of no speech is wanted."""
    drops_silence: bool = False
    """It tells whether the text of a clip is dropped where it is implausible and nothing is
    said."""
    detects_language: bool = False
    duration_s: float = 0.0
    """Known with the first clips."""


@dataclass(slots=True)
class RecordingCharges:
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
class ClipPasses:
    """It makes the passes of one recording; `charges` grow with each pass but that of `align`."""

    recording: Recording
    pipeline: PromptRunner
    max_buffered_tokens: int
    charges: RecordingCharges = field(default_factory=RecordingCharges)

    async def first_tokens(self, transcripts: Sequence[Transcript]) -> list[int | None]:
        """Return the most likely language after the start token, and note how likely speech is."""
        facts = self.recording.task.facts
        languages = sorted(facts.languages.values())
        hears = facts.no_speech_id >= 0
        # nothing restricts the draw: a worker may show log-probabilities of what is left by that
        sampling = SamplingParams(
            seed=0,
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            logprob_token_ids=[*languages, facts.no_speech_id] if hears else languages,
        )
        found: list[int | None] = [None] * len(transcripts)
        jobs = [
            self.job(index, transcript, [facts.start_id], sampling, 1)
            for index, transcript in enumerate(transcripts)
        ]
        with span("detect_language", {REQUEST_ID: self.recording.job.request_id}):
            async with self.deliver(jobs) as delivery:
                async for chunks in delivery.chunks():
                    for chunk in chunks:
                        for entry in chunk.logprobs:
                            values = entry.top_logprobs
                            if languages and values:
                                best = values.index(max(values[: len(languages)]))
                                found[chunk.choice] = languages[best]
                            no_speech = exp(values[-1]) if hears and values else 0.0
                            transcripts[chunk.choice].no_speech = no_speech
        return found

    async def align(self, transcripts: Sequence[Transcript]) -> None:
        """Find where each token ends, by one pass over the transcript, which is not charged."""
        task, most = self.recording.task, self.recording.job.card.max_model_len - 1
        prompt = task.prompt()
        aligned = [each for each in transcripts if each.token_ids]
        jobs = []
        for index, each in enumerate(aligned):
            rule = task.alignment(each.clip)
            sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, speech=rule)
            ids = [*prompt, *each.token_ids][:most]
            jobs.append(self.job(index, each, ids, sampling, 1))
        if not jobs:
            return
        with span("align", {REQUEST_ID: self.recording.job.request_id}):
            async with self.deliver(jobs, RecordingCharges()) as delivery:
                async for _ in delivery.chunks():
                    pass
                for each, choice in zip(aligned, delivery.choices, strict=True):
                    each.token_ends = _ends_of(choice.alignment, len(each.token_ids))

    def deliver(
        self, jobs: list[PromptJob], charges: RecordingCharges | None = None
    ) -> AbstractAsyncContextManager[Delivery]:
        """`charges`: in place of those of all passes."""
        recording = self.recording
        request = GenerationRequest(
            head=recording.head,
            jobs=tuple(jobs),
            text=recording.text,
            options=_PLAIN,
            chunks=ChunkOptions(),
            is_stream=True,
        )
        return deliver(self.pipeline, request, self.max_buffered_tokens, charges or self.charges)

    def job(
        self,
        index: int,
        transcript: Transcript,
        prompt: list[int],
        sampling: SamplingParams,
        max_tokens: int | None,
    ) -> PromptJob:
        """`index`: of the choice that it becomes."""
        job = self.recording.job
        ids = pack_ids(prompt)
        return replace(
            job,
            request_id=RequestId(f"{job.request_id}-{index}"),
            prompt=IdsPrompt(token_ids=ids),
            tokenized=tokenized(prompt, transcript.clip, self.recording.task.facts),
            sampling=sampling,
            max_tokens=max_tokens,
            cuts_max_tokens=True,
            first_choice=index,
        )


_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class RecordingRun:
    """It holds what turns one recording, or one speech, into text."""

    recording: Recording
    passes: ClipPasses
    calls: ServiceCalls
    admission: Admission
    blobs: Blobs
    settings: GatewaySettings
    meter: Meter
    usage: Usage | None = field(default=None, init=False)
    """The usage that the tenant was charged for; None until the end."""

    async def _prepare_audio(self, message: Message, expected: type[_Answer]) -> _Answer:
        """The answer of a tokenizer, which makes the features of clips."""
        job, timeout_s = self.recording.job, self.settings.audio_timeout_s
        return await self.calls.request(
            tokenize(job.card.name),
            message,
            expected,
            timeout_s=timeout_s,
            deadline_s=job.deadline_s,
            hedge_after_s=timeout_s / 2,
        )

    def _charge(self, audio_tokens: int, audio_s: float) -> None:
        """Charge the recording, unless it failed before its first token."""
        job, charges = self.recording.job, self.passes.charges
        if not charges.completion_tokens:
            return
        has_own = self.recording.task.facts.embed_id >= 0  # tokens of the prompt
        usage = self.usage = usage_of(
            charges.prompt_tokens + (0 if has_own else audio_tokens),
            charges.completion_tokens,
            charges.cached_tokens,
            media_tokens={AUDIO: audio_tokens},
        )
        self.admission.charge(job.tenant, job.card.name, [usage])
        self.meter.count_audio(audio_s)


def _ends_of(alignment: list[int] | None, count: int) -> list[int]:
    """Return the ends of all tokens; those that no longer fit the prompt end with the last one that
    does.

    Raises ProtocolError for a worker that has not aligned them.
    """
    if not alignment or len(alignment) > count:
        raise ProtocolError("the worker has not aligned the transcript")
    return alignment + alignment[-1:] * (count - len(alignment))
