"""A recording is transcribed clip after clip, and charged as one request."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmesh.services.gateway.apis.audio.clip_passes import Recording, RecordingCharges
from tokenmesh.services.gateway.apis.audio.prompts import SpeechTask
from tokenmesh.services.gateway.apis.audio.request import TranscriptionRequest, read_fields
from tokenmesh.services.gateway.apis.audio.segments import Transcript
from tokenmesh.services.gateway.apis.audio.transcriber import Transcriber
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.request import Head, PromptJob
from tokenmesh.services.gateway.core.generation.usage import usage_of
from tokenmesh.services.gateway.core.tenancy.tenant import DEFAULT_TENANT
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, TokenMeshError
from tokenmesh.shared.ids import BlobKey, ModelName, RequestId
from tokenmesh.shared.messages import AudioPrepared
from tokenmesh.shared.messages.audio import AudioClip, SpeechFacts
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.messages.tokens import TokenLogprobs

END = 100
JOB = PromptJob(
    request_id=RequestId("r"),
    card=ModelCard(name=ModelName("m"), max_model_len=64, vocab_size=200),
    prompt=IdsPrompt(token_ids=b""),
    sampling=SamplingParams(seed=1, max_tokens=1, temperature=0.0),
    max_tokens=None,
    deadline_s=0.0,
)


@dataclass
class Written:
    """The model's text about every clip at one temperature."""

    token_ids: Sequence[int]
    logprob: float = -0.1
    error: TokenMeshError | None = None
    """Raised after the first token."""


class Passes:
    """Writes tokens for each clip, one at a time."""

    def __init__(self, *written: Written, no_speech: float = 0.0) -> None:
        """One for each pass; the last of them for all further ones."""
        self.charges = RecordingCharges()
        self.temperatures: list[float] = []
        self.num_probed = 0
        self._written = written
        self._no_speech = no_speech

    def job(self, index: int, _: Transcript, __: Any, sampling: SamplingParams, ___: Any) -> Any:
        return index, sampling.temperature

    async def first_tokens(self, transcripts: Sequence[Transcript]) -> None:
        self.num_probed += len(transcripts)
        for transcript in transcripts:
            transcript.no_speech = self._no_speech

    @asynccontextmanager
    async def deliver(self, jobs: list[tuple[int, float]]) -> AsyncIterator[Any]:
        written = self._written[min(len(self.temperatures), len(self._written) - 1)]
        (temperature,) = {each for _, each in jobs}
        self.temperatures.append(temperature)
        last, num_made = len(written.token_ids) - 1, 0

        async def chunks() -> AsyncIterator[list[OutputChunk]]:
            nonlocal num_made
            for place, token in enumerate(written.token_ids):
                finish = "stop" if place == last else None
                entry = TokenLogprobs(token, written.logprob, 0)
                num_made += len(jobs)
                yield [
                    OutputChunk(index, token_ids=[token], logprobs=[entry], finish_reason=finish)
                    for index, _ in jobs
                ]
                if written.error is not None:
                    raise written.error

        try:
            yield SimpleNamespace(chunks=chunks, prompts=(), choices=())
        finally:
            usages = [usage_of(len(jobs), num_made, None)]
            self.charges.charge(DEFAULT_TENANT, "m", usages)


class Charged:
    """Keeps what the tenant was charged."""

    def __init__(self) -> None:
        self.completion_tokens: list[int] = []

    def charge(self, _tenant: Any, _model: str, usages: Any) -> None:
        self.completion_tokens += [usage.completion_tokens for usage in usages]


def transcriber(passes: Passes, charged: Charged, *temperatures: float) -> Transcriber:
    facts = SpeechFacts(
        start_id=END + 1, end_id=END, no_timestamps_id=END + 2, no_speech_id=END + 3
    )
    decode = SimpleNamespace(decode=lambda ids: "".join(chr(64 + each) for each in ids))
    recording = Recording(
        job=JOB,
        head=Head("h", 0, "m"),
        text=SimpleNamespace(vocabulary=decode),  # type: ignore[arg-type]
        task=SpeechTask(facts=facts),
        source=BlobKey("source"),
        temperatures=temperatures or (0.0,),
    )
    clips = [
        AudioClip(start_s=each, end_s=each + 1.0, content_hash=str(each), features=BlobKey("f"))
        for each in range(2)
    ]

    async def prepared(*_: Any, **__: Any) -> AudioPrepared:
        return AudioPrepared(duration_s=2.0, total=2, clips=clips)

    meter = SimpleNamespace(
        flush=lambda _: None,
        finish=lambda *_: None,
        count_audio=lambda _: None,
        count_audio_retries=lambda _: None,
    )
    calls, blobs = SimpleNamespace(request=prepared), SimpleNamespace()
    around: Any = (passes, calls, charged, blobs, GatewaySettings(), meter)
    return Transcriber(recording, *around)


def context() -> RequestContext:
    return RequestContext(RequestId("r"), False, 0.0)


async def transcripts(passes: Passes, *temperatures: float) -> list[Transcript]:
    """Those of both clips, complete."""
    running = transcriber(passes, Charged(), *temperatures).run(context())
    return [transcript async for transcript, is_done in running if is_done]


async def test_clips_end_in_order_and_are_charged_once() -> None:
    charged, done = Charged(), list[Transcript]()
    running = transcriber(Passes(Written([5, 6, END])), charged).run(context())
    async for transcript, is_done in running:
        if is_done:
            done.append(transcript)
    assert [each.clip.start_s for each in done] == [0, 1]
    assert [each.token_ids for each in done] == [[5, 6, END]] * 2
    assert charged.completion_tokens == [6]


async def test_a_recording_that_is_left_early_is_charged_for_what_was_made() -> None:
    charged = Charged()
    growing = transcriber(Passes(Written([5, 6, 7, END])), charged).run(context())
    await anext(growing)
    await growing.aclose()
    assert charged.completion_tokens == [2]


PLAUSIBLE = Written([5, 6, END])
UNLIKELY = Written([7, 8, END], -1.5)
REPEATED = Written([*[9, 10] * 40, END])


async def test_a_plausible_transcript_is_drawn_once() -> None:
    passes = Passes(PLAUSIBLE)
    done = await transcripts(passes, 0.0, 0.4)
    assert passes.temperatures == [0.0]
    assert [each.temperature for each in done] == [0.0, 0.0]
    assert passes.num_probed == 0


@pytest.mark.parametrize("bad", [UNLIKELY, REPEATED])
async def test_an_implausible_transcript_is_drawn_at_further_temperatures(bad: Written) -> None:
    passes = Passes(bad, bad, PLAUSIBLE)
    done = await transcripts(passes, 0.0, 0.4, 0.8, 1.0)
    assert passes.temperatures == [0.0, 0.4, 0.8]
    assert [each.token_ids for each in done] == [PLAUSIBLE.token_ids] * 2
    assert [each.logprob for each in done] == pytest.approx([-0.1, -0.1])
    assert [each.temperature for each in done] == [0.8, 0.8]
    assert passes.charges.completion_tokens == 2 * (2 * len(bad.token_ids) + 3)


async def test_the_transcript_of_the_last_temperature_is_taken_as_it_is() -> None:
    passes = Passes(UNLIKELY)
    done = await transcripts(passes, 0.0, 1.0)
    assert passes.temperatures == [0.0, 1.0]
    assert [each.token_ids for each in done] == [UNLIKELY.token_ids] * 2
    assert passes.num_probed == 2  # once for each clip


async def test_a_transcript_stays_where_it_cannot_be_drawn_again() -> None:
    broken, about = Written([9, END], -0.1, Overloaded("no room")), context()
    passes, charged = Passes(UNLIKELY, broken), Charged()
    running = transcriber(passes, charged, 0.0, 1.0).run(about)
    done = [transcript async for transcript, is_done in running if is_done]
    assert [each.token_ids for each in done] == [UNLIKELY.token_ids] * 2
    assert [each.temperature for each in done] == [0.0, 0.0]
    assert about.warnings == ["implausible clips were not drawn again: no room"]
    assert charged.completion_tokens == [2 * 3 + 2]
    with pytest.raises(Overloaded):
        await transcripts(Passes(broken), 0.0, 1.0)


async def test_silence_is_not_drawn_again() -> None:
    passes = Passes(UNLIKELY, no_speech=0.7)
    await transcripts(passes, 0.0, 1.0)
    assert passes.temperatures == [0.0]


@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0)])
async def test_implausible_text_about_silence_is_dropped(temperatures: tuple[float, ...]) -> None:
    for written, no_speech, kept in (
        (UNLIKELY, 0.7, []),
        (UNLIKELY, 0.5, UNLIKELY.token_ids),
        (PLAUSIBLE, 0.7, PLAUSIBLE.token_ids),
    ):
        passes = Passes(written, no_speech=no_speech)
        running = transcriber(passes, Charged(), *temperatures)
        running.recording.drops_silence = True
        done = [each async for each, is_done in running.run(context()) if is_done]
        assert [each.token_ids for each in done] == [kept] * 2


def test_a_request_names_its_temperatures() -> None:
    def tried(*form: tuple[str, str]) -> tuple[float, ...]:
        return read_fields(TranscriptionRequest, list(form))[0].tried((0.0, 0.5))

    assert tried() == tried(("temperature", "0")) == (0.0, 0.5)
    assert tried(("temperature", "0.3")) == (0.3,)
    assert tried(("stream", "true")) == (0.0,)
    assert tried(("temperatures[]", "0"), ("temperatures[]", "0.7")) == (0.0, 0.7)
    for wrong in (
        (("temperatures[]", "0.1"), ("temperature", "0.2")),
        (("temperatures[]", "0.1"), ("temperatures[]", "0.2"), ("stream", "true")),
        (("temperatures[]", "-1"),),
        tuple(("temperatures", "0.1") for _ in range(17)),
    ):
        with pytest.raises(InvalidInput, match="temperatures"):
            tried(*wrong)
