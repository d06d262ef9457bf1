"""A tokenizer or an encoder dies or stands still for 10 s: what was asked meanwhile is answered
soon after it is back, with the same tokens as in peace."""

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.mesh_process import READY_S, MeshProcess, mesh
from tests.fakes.images import data_uri, image_file
from tests.fakes.media_family import image
from tests.fakes.media_models import media_checkpoint
from tests.fakes.omni import NAME as OMNI
from tests.fakes.omni import whole_checkpoint
from tests.fakes.recordings import audio_file, tones
from tests.fakes.whisper import whisper
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.demo_model import PATH as DEMO_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(280), pytest.mark.asyncio]

logger = logging.getLogger(__name__)

BACK_S = 2.0
"""From the return of a service to the first token of what was asked while it was away."""
AWAY_S = 10.0
POLL_S = 0.02
ROUND_S = 1.0
MEDIA_ROUNDS = 4
"""Media are asked about in one of so many rounds: they take two cores for long."""
MAX_TOKENS = 8


@dataclass(slots=True)
class Asked:
    """One request and when its first token came; `time.monotonic` seconds."""

    kind: str
    number: int
    sent_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    text: str = ""

    def note(self, text: str | None) -> None:
        if text and not self.text:
            self.first_s = time.monotonic()
        self.text += text or ""


def content_of(kind: str, number: int) -> list[dict[str, Any]]:
    """Return a chat's content; each number has its own text and media: no answer is a copy."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"Tell me about number {number}."}]
    if kind == "image":
        parts += [{"type": "image_url", "image_url": {"url": data_uri(image_file(image(number)))}}]
    if kind == "recording":
        data = base64.b64encode(audio_file(tones(1.5, seed=number))).decode()
        parts += [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    return parts


async def ask_chat(client: openai.AsyncOpenAI, asked: Asked, media: str) -> None:
    message: Any = {"role": "user", "content": content_of(media, asked.number)}
    stream = await client.chat.completions.create(
        model="omni" if media else "text",
        messages=[message],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    async for chunk in stream:
        asked.note(chunk.choices[0].delta.content)


async def ask_completion(client: openai.AsyncOpenAI, asked: Asked) -> None:
    stream = await client.completions.create(
        model="text",
        prompt=f"Number {asked.number} is",
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    async for chunk in stream:
        asked.note(chunk.choices[0].text)


async def ask_embedding(client: openai.AsyncOpenAI, asked: Asked) -> None:
    answer = await client.embeddings.create(model="numbers", input=f"Number {asked.number}")
    asked.note(" ".join(f"{each:.4f}" for each in answer.data[0].embedding))


async def ask_transcript(client: openai.AsyncOpenAI, asked: Asked) -> None:
    file = ("speech.wav", audio_file(tones(2.0, seed=asked.number)))
    stream = await client.audio.transcriptions.create(
        model="speech", file=file, language="en", stream=True, extra_body={"temperature": 0}
    )
    async for event in stream:
        if event.type == "transcript.text.delta":
            asked.note(event.delta)


ASKS: dict[str, Callable[[openai.AsyncOpenAI, Asked], Coroutine[Any, Any, None]]] = {
    "chat": partial(ask_chat, media=""),
    "chat with an image": partial(ask_chat, media="image"),
    "chat with a recording": partial(ask_chat, media="recording"),
    "completion": ask_completion,
    "embedding": ask_embedding,
    "transcript": ask_transcript,
}


TEXTS = ("chat", "completion", "embedding")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "plain").mkdir()
    omni = whole_checkpoint(folder / "omni", media_checkpoint(folder / "plain", OMNI))
    (folder / "speech").mkdir()
    config = folder / "mesh.toml"
    config.write_text(
        f"""
[[models]]
model = "{DEMO_MODEL}"
served_model_name = ["text"]
[[models]]
model = "{DEMO_MODEL}"
served_model_name = ["numbers"]
runner = "pooling"
[[models]]
model = "{omni}"
served_model_name = ["omni"]
dtype = "float32"
[[models]]
model = "{whisper(folder / "speech")}"
served_model_name = ["speech"]
dtype = "float32"
[worker]
device = "cpu"
max_num_seqs = 8
[encoder]
device = "cpu"
[up]
restart_max_s = 0.5
"""
    )
    with mesh(free_port(), "--config", str(config)) as process:
        process.wait_workers(4)
        yield process


@pytest.fixture
async def client(running: MeshProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{running.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


class Asking:
    """Requests of every kind, one round a second, until it is over."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[Asked]] = []
        self._number = 0

    @classmethod
    async def begun(cls, client: openai.AsyncOpenAI) -> "Asking":
        """Every kind has been answered once: what a gateway learns of a model, it knows."""
        asking = cls(client)
        for kind in ASKS:
            assert (await asking.ask(kind, 0)).text, kind
        return asking

    async def ask(self, kind: str, number: int) -> Asked:
        asked = Asked(kind, number)
        await ASKS[kind](self._client, asked)
        return asked

    def ask_all(self) -> None:
        has_media = self._number % MEDIA_ROUNDS == 0
        self._number += 1
        for kind in ASKS:
            if has_media or kind in TEXTS:
                self._tasks.append(asyncio.create_task(self.ask(kind, self._number)))

    async def for_seconds(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.ask_all()
            await asyncio.sleep(ROUND_S)

    async def all(self) -> list[Asked]:
        return [await each for each in self._tasks]


async def returned(running: MeshProcess, service: str, old: str) -> float:
    """When another process of the service is heard, by `time.monotonic`."""
    async with httpx.AsyncClient(base_url=running.url, timeout=READY_S) as client:
        async with asyncio.timeout(READY_S):
            while await heard(client, service) in (None, old):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    return time.monotonic()


async def heard(client: httpx.AsyncClient, service: str) -> str | None:
    """The newest process of the service that answers."""
    processes = (await client.get("/mesh")).json()["processes"]
    ids = [(each["last_beat_s"], each["id"]) for each in processes if each["service"] == service]
    return min(ids)[1] if ids else None


async def check(asking: Asking, back_s: float, what: str) -> None:
    """All of them come back at once: what that takes in peace is the machine's time, not ours."""
    answers = await asking.all()
    meanwhile = [each for each in answers if each.sent_s < back_s]
    assert len(meanwhile) > len(ASKS)
    late = last_first(meanwhile, back_s)
    began_s = time.monotonic()
    again = await asyncio.gather(*(asking.ask(each.kind, each.number) for each in meanwhile))
    in_peace = last_first(again, began_s)
    logger.info("%s; seconds after its return %s, at once in peace %s", what, late, in_peace)
    assert [each.text for each in again] == [each.text for each in meanwhile]
    assert all(late[kind] < BACK_S + in_peace[kind] for kind in ASKS), (late, in_peace)


def last_first(answers: list[Asked], since_s: float) -> dict[str, float]:
    """The last first token of each kind."""
    return {
        kind: round(max(each.first_s - since_s for each in answers if each.kind == kind), 2)
        for kind in ASKS
    }


@pytest.mark.parametrize("service", ["tokenizer", "encoder"])
async def test_a_service_that_is_killed(
    running: MeshProcess, client: openai.AsyncOpenAI, service: str
) -> None:
    asking = await Asking.begun(client)
    async with httpx.AsyncClient(base_url=running.url, timeout=READY_S) as plain:
        old = await heard(plain, service)
    assert old is not None
    process = running.service(service)
    # stopped first, so that it dies with requests in its hands
    process.suspend()
    await asking.for_seconds(2.0)
    process.kill()
    asking.ask_all()
    back_s = await returned(running, service, old)
    await check(asking, back_s, f"{service} killed")


@pytest.mark.parametrize("service", ["tokenizer", "encoder"])
async def test_a_service_that_stands_still(
    running: MeshProcess, client: openai.AsyncOpenAI, service: str
) -> None:
    asking = await Asking.begun(client)
    process: psutil.Process = running.service(service)
    process.suspend()
    await asking.for_seconds(AWAY_S)
    process.resume()
    await check(asking, time.monotonic(), f"{service} stood still")
