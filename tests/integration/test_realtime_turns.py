"""Turns of a realtime session that are spoken, and answered by their transcript."""

import asyncio
import base64
import json
from typing import Any

import pytest
import websockets

from tests.fakes.back_end import BackEnd
from tests.fakes.recordings import tones
from tests.integration.test_realtime import TEXT, talking
from tokenmesh.services.gateway.apis.realtime.item_transcript import (
    EVENT,
    FinishedTranscript,
    ItemTranscripts,
)
from tokenmesh.services.gateway.apis.realtime.speech_input import SpeechInput
from tokenmesh.shared.errors import Overloaded
from tokenmesh.shared.messages.tokenize import ChatPrompt


async def test_a_turn_is_answered_by_what_was_said(
    mesh: BackEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hear(_self: SpeechInput, turn: Any, _wanted: object) -> None:
        seconds = len(turn.audio) / 2 / turn.config.rate
        content = {"type": "input_audio", "transcript": f"{seconds:.0f} s of tones"}
        turn.item.change(content=[content])

    monkeypatch.setattr(SpeechInput, "_transcribe", hear)
    quiet = bytes(2 * 24000)
    sound = (tones(1.0, 24000) * 32767).astype("<i2").tobytes()
    audio = base64.b64encode(quiet + sound + quiet).decode()
    for transcription in (None, {"language": "en"}):
        async with talking(mesh) as talk:
            session: Any = {
                "type": "realtime",
                "audio": {"input": {"transcription": transcription}},
            }
            await talk.connection.session.update(session=session)
            await talk.until("session.updated")
            await talk.connection.input_audio_buffer.append(audio=audio)
            if transcription is None:
                events = await talk.until("conversation.item.done")
                error = await talk.next()
                assert "audio without a transcript" in error.error.message
                continue
            events = await talk.until("response.done")
    assert events[-1].response.output[0].content[0].text == TEXT
    (received,) = mesh.tokenizer.received
    assert isinstance(received.prompt, ChatPrompt)
    messages = json.loads(received.prompt.messages_json)
    assert [each["content"] for each in messages] == ["2 s of tones"]


async def test_a_response_waits_for_the_transcript_of_what_was_committed(
    mesh: BackEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Push to talk: append, commit and response.create, sent at once."""
    may_end, problems = asyncio.Event(), [None, Overloaded("no room")]

    async def hear(_self: SpeechInput, turn: Any, _wanted: object) -> None:
        await may_end.wait()
        problem = problems.pop(0)
        if problem is not None:
            raise problem
        turn.item.change(content=[{"type": "input_audio", "transcript": "27 and 45"}])

    monkeypatch.setattr(SpeechInput, "_transcribe", hear)
    audio = base64.b64encode(bytes(48000)).decode()
    audio_input = {"transcription": {"language": "en"}, "turn_detection": None}
    async with talking(mesh) as talk:
        session: Any = {"type": "realtime", "audio": {"input": audio_input}}
        await talk.connection.session.update(session=session)
        await talk.until("session.updated")
        await talk.connection.input_audio_buffer.append(audio=audio)
        await talk.connection.input_audio_buffer.commit()
        await talk.connection.response.create()
        await talk.until("conversation.item.done")
        error = await talk.refused({"type": "response.create"})
        assert "already waits" in error.message
        assert error.code == "conversation_already_has_active_response"
        assert not mesh.tokenizer.received
        may_end.set()
        events = await talk.until("response.done")
        assert events[-1].response.output[0].content[0].text == TEXT
        await talk.connection.input_audio_buffer.append(audio=audio)
        await talk.connection.input_audio_buffer.commit()
        await talk.connection.send({"type": "response.create", "event_id": "mine"})
        await talk.until("conversation.item.input_audio_transcription.failed")
        error = await talk.next()
        assert error.error.event_id == "mine"
        assert "audio without a transcript" in error.error.message
    (received,) = mesh.tokenizer.received
    assert isinstance(received.prompt, ChatPrompt)
    assert json.loads(received.prompt.messages_json)[0]["content"] == "27 and 45"


async def test_a_client_of_vllm_gets_the_text_in_its_dialect(
    mesh: BackEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like its example of a file, it commits before any audio, and finally after all of it."""

    async def hear(
        self: ItemTranscripts, item_id: str, _fields: object, audio: bytes, rate: int
    ) -> FinishedTranscript:
        text = f"{len(audio)} bytes at {rate}"
        await self.channel.send({"type": f"{EVENT}.delta", "item_id": item_id, "delta": text})
        return FinishedTranscript(text, 1.0, {"prompt_tokens": 3, "completion_tokens": 5})

    async def wait(*_: object) -> None:
        """The model needs all of the audio."""

    monkeypatch.setattr(ItemTranscripts, "whole", hear)
    monkeypatch.setattr(ItemTranscripts, "live", wait)
    audio = base64.b64encode(bytes(4096)).decode()
    sent = [
        {"type": "session.update", "model": mesh.model},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.append", "audio": audio},
        {"type": "input_audio_buffer.append", "audio": "%%%"},
        {"type": "input_audio_buffer.append", "audio": audio},
        {"type": "input_audio_buffer.commit", "final": True},
    ]
    async with websockets.connect(mesh.url.replace("http", "ws", 1) + "/v1/realtime") as socket:
        created = json.loads(await socket.recv())
        assert (created["type"], created["id"]) == ("session.created", created["session"]["id"])
        assert isinstance(created["created"], int)
        for event in sent:
            await socket.send(json.dumps(event))
        error, delta, done = [json.loads(await socket.recv()) for _ in range(3)]
    assert error.keys() == {"type", "error", "code"}
    assert "not base64" in error["error"]
    assert delta == {"type": "transcription.delta", "delta": "8192 bytes at 16000"}
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert done == {"type": "transcription.done", "usage": usage, "text": delta["delta"]}
