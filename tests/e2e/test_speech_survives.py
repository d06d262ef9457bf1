"""Transcripts outlive the worker that makes them, in realtime sessions, of speech that goes on too,
and in uploads; and so do answers about images, recordings and videos."""

import base64
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import pytest

from tests.e2e.mesh_process import MeshProcess, busiest, cpu_seconds, mesh
from tests.fakes.audio_models import streaming_checkpoint
from tests.fakes.media_models import media_checkpoint
from tests.fakes.omni import FILM, OPTIONS, whole_checkpoint
from tests.fakes.omni import NAME as OMNI
from tests.fakes.recordings import audio_file, tones
from tests.fakes.whisper import whisper
from tests.integration.test_omni_chats import part_of
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.messages.media import AUDIO, IMAGE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.asyncio]
NAME = "speech"
EVENT = "conversation.item.input_audio_transcription"
SOUNDS = [tones(3.9, seed=seed) for seed in range(4)]
MAX_ROUNDS = 5
"""A kill may come when the worker has just sent its last token."""


class Killer:
    """Kills the worker that computes, once in each session."""

    def __init__(self, running: MeshProcess) -> None:
        self._workers = running.wait_workers(2)
        self._before = cpu_seconds(self._workers)
        self._has_killed = False

    def kill(self) -> None:
        if not self._has_killed:
            busiest(self._workers, self._before).kill()
            self._has_killed = True


async def transcripts(
    running: MeshProcess, killer: Killer | None, language: str | None = "en"
) -> list[str]:
    """Transcribe each sound, in one session; the worker dies after the first delta."""
    client = openai.AsyncOpenAI(
        base_url="http://unused",
        api_key="none",
        websocket_base_url=running.url.replace("http", "ws") + "/v1",
    )
    audio_input = {
        "format": {"type": "audio/pcm", "rate": 16000},
        "transcription": {"language": language},
        "turn_detection": None,
    }
    session: Any = {"type": "transcription", "audio": {"input": audio_input}}
    deltas: dict[str, str] = {}
    done: dict[str, str] = {}
    query = {"intent": "transcription"}
    async with client, client.realtime.connect(model=NAME, extra_query=query) as talk:
        await talk.session.update(session=session)
        for sound in SOUNDS:
            data = numpy.round(sound * 32767).astype("<i2").tobytes()
            await talk.input_audio_buffer.append(audio=base64.b64encode(data).decode())
            await talk.input_audio_buffer.commit()
        events: Any = talk
        async for event in events:
            assert event.type not in ("error", f"{EVENT}.failed"), event
            if event.type == f"{EVENT}.delta":
                deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
                if killer is not None:
                    killer.kill()
            if event.type == f"{EVENT}.completed":
                done[event.item_id] = event.transcript
            if len(done) == len(SOUNDS):
                break
    assert {key: text.strip() for key, text in deltas.items()} == done
    return list(done.values())


async def uploaded(running: MeshProcess, killer: Killer | None) -> str:
    """The transcript of all sounds as one file, streamed; the worker dies after the first delta."""
    url, text = f"{running.url}/v1", ""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        file = ("speech.wav", audio_file(numpy.concatenate(SOUNDS)))
        stream = await client.audio.transcriptions.create(
            model=NAME, file=file, language="en", stream=True
        )
        async for event in stream:
            if event.type == "transcript.text.delta":
                text += event.delta
                if killer is not None:
                    killer.kill()
            elif event.type == "transcript.text.done":
                assert event.text == text
    return text


def num_recoveries(running: MeshProcess) -> int:
    """Streams that another worker continued."""
    text = httpx.get(f"{running.url}/metrics").text
    found = re.findall(r"^tokenmesh:recoveries_total{.*} (.+)$", text, re.M)
    return sum(int(float(value)) for value in found)


async def answered(running: MeshProcess, killer: Killer | None) -> str:
    """Stream the answer of a chat with an image, a recording and a video with its sound."""
    url, text = f"{running.url}/v1", ""
    extra: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}
    extra |= {"mm_processor_kwargs": {**OPTIONS, "use_audio_in_video": True}}
    content: list[Any] = [part_of(*item) for item in ((IMAGE, 1), (AUDIO, 2), (FILM, 1))]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": content}],
            max_tokens=400,
            temperature=0,
            stream=True,
            extra_body=extra,
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if killer is not None and text:
                killer.kill()
    return text


@contextmanager
def two_workers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MeshProcess]:
    monkeypatch.setenv("TOKENMESH_UP__RESTART_MAX_S", "0.5")
    flags = ("--workers", "2", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8")
    with mesh(free_port(), str(checkpoint), "--served-model-name", NAME, *flags) as running:
        yield running


async def check_survives(
    running: MeshProcess, make: Callable[[MeshProcess, Killer | None], Awaitable[Any]]
) -> None:
    """Check that a result is the same when a worker dies meanwhile."""
    expected, before = await make(running, None), num_recoveries(running)
    for _ in range(MAX_ROUNDS):
        assert await make(running, Killer(running)) == expected
        if num_recoveries(running) > before:
            return
    raise AssertionError("no stream has moved")


async def test_transcripts_outlive_their_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_workers(whisper(tmp_path), monkeypatch) as running:
        assert len(set(await transcripts(running, None))) == len(SOUNDS)
        await check_survives(running, transcripts)
        await check_survives(running, uploaded)


async def test_the_transcript_of_speech_that_goes_on_outlives_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_workers(streaming_checkpoint(tmp_path), monkeypatch) as running:
        await check_survives(running, partial(transcripts, language=None))


async def test_an_answer_about_media_outlives_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = media_checkpoint(tmp_path, OMNI)
    with two_workers(whole_checkpoint(tmp_path / "whole", plain), monkeypatch) as running:
        await check_survives(running, answered)
