"""A tokenizer goes on whatever text it gets: its event loop runs, and its memory comes back."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest

from tests.fakes.hostile_texts import TEXTS
from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import InvalidInput, TokenMeshError
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import Message
from tokenmesh.shared.messages.tokenize import (
    BAD_WORDS_CHARS,
    ChatPrompt,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokenizeTexts,
)
from tokenmesh.shared.tokens import count_ids

SHORT = "mixed word"
CHARS = 200_000
MOST_GAP_S = 0.15
"""Far above what a busy machine adds, far below the second and more of an encoding that keeps the
interpreter's lock."""


@pytest.fixture(params=["plain", "guarded"])
async def model(
    request: Any, bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[ModelName]:
    name = ModelName(f"texts-{secrets.token_hex(4)}")
    model = ModelSettings(
        model=str(byte_level_bpe(tmp_path)),
        served_model_name=(name,),
        max_model_len=200_000,
        allow_special_tokens_in_content=request.param == "plain",
    )
    settings = Settings(models=(model,), bus=bus_settings, redis=redis_settings)
    async with running("tokenizer", settings, build):
        yield name


class Gaps:
    """The longest time for which the event loop, and so any other thread, had to wait."""

    async def __aenter__(self) -> "Gaps":
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            began_s = perf_counter()
            await asyncio.sleep(0.001)
            self.worst_s = max(self.worst_s, perf_counter() - began_s)


def messages_of(model: ModelName, text: str) -> list[Tokenize | TokenizeTexts]:
    base: dict[str, Any] = {"request_id": RequestId("r"), "model": model}
    short = TextPrompt(text="x")
    chat = ChatPrompt(messages_json=msgspec.json.encode([{"role": "user", "content": text}]))
    return [
        Tokenize(**base, prompt=TextPrompt(text=text), max_tokens=100),
        Tokenize(**base, prompt=TextPrompt(text=text), truncate_prompt_tokens=1),
        Tokenize(
            **base,
            prompt=TextPrompt(text=text),
            truncate_prompt_tokens=3,
            truncation_side="right",
        ),
        Tokenize(**base, prompt=short, bad_words=[text]),
        Tokenize(**base, prompt=short, bad_words=[text[: BAD_WORDS_CHARS - 1], "x"]),
        Tokenize(**base, prompt=chat, truncate_prompt_tokens=2),
        TokenizeTexts(**base, texts=[text], truncate_prompt_tokens=4),
    ]


async def ask(bus: MessageBus, message: Tokenize | TokenizeTexts) -> Message | InvalidInput:
    subject = subjects.tokenize(message.model)
    try:
        return await bus.request(subject, message, deadline_s=now_s() + 15)
    except InvalidInput as error:
        return error


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == SHORT else pytest.mark.slow) for kind in TEXTS]
)
async def test_the_event_loop_runs_while_any_text_is_encoded(
    bus: MessageBus, model: ModelName, kind: str
) -> None:
    text = TEXTS[kind](CHARS)
    small = Tokenize(request_id=RequestId("s"), model=model, prompt=TextPrompt(text="small"))
    for message in messages_of(model, text):
        async with Gaps() as gaps:
            answer = await ask(bus, message)
        assert gaps.worst_s < MOST_GAP_S, message.__class__
        if isinstance(answer, Tokenized):
            limit = message.truncate_prompt_tokens
            assert limit is None or count_ids(answer.token_ids) == limit
        assert isinstance(await ask(bus, small), Tokenized)


async def test_bad_words_are_bounded_in_characters(bus: MessageBus, model: ModelName) -> None:
    words = ["w" * 1000] * (BAD_WORDS_CHARS // 1000 + 1)
    message = Tokenize(
        request_id=RequestId("r"), model=model, prompt=TextPrompt(text="x"), bad_words=words
    )
    with pytest.raises(TokenMeshError, match="at most 65536") as refused:
        await bus.request(subjects.tokenize(model), message, deadline_s=now_s() + 15)
    assert isinstance(refused.value, InvalidInput)
    assert refused.value.param == "bad_words"
