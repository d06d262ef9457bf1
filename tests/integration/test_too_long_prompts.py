"""Prompts that no worker could take: refused without ids, and without encoding where possible."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import PromptTooLong
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import Message
from tokenmesh.shared.messages.tokenize import ChatPrompt, TextPrompt, Tokenize, Tokenized
from tokenmesh.shared.tokens import count_ids

MODEL = ModelName("long")
LIMIT = 10


@pytest.fixture
async def tokenizer(
    bus: MessageBus, bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[MessageBus]:
    model = ModelSettings(model=str(byte_level_bpe(tmp_path)), served_model_name=(MODEL,))
    settings = Settings(models=(model,), bus=bus_settings, redis=redis_settings)
    async with running("tokenizer", settings, build):
        yield bus


async def ask(bus: MessageBus, prompt: TextPrompt | ChatPrompt, **fields: int) -> Message:
    message = Tokenize(request_id=RequestId("r"), model=MODEL, prompt=prompt, **fields)  # type: ignore[arg-type]
    return await bus.request(subjects.tokenize(MODEL), message, deadline_s=now_s() + 10)


async def test_a_prompt_over_the_limit_is_counted_and_not_sent(tokenizer: MessageBus) -> None:
    answer = await ask(tokenizer, TextPrompt(text="a b " * LIMIT), max_tokens=LIMIT)
    assert isinstance(answer, Tokenized)
    assert answer.token_ids == b""
    whole = await ask(tokenizer, TextPrompt(text="a b " * LIMIT))
    assert isinstance(whole, Tokenized)
    assert answer.too_many == count_ids(whole.token_ids) > LIMIT


async def test_a_prompt_that_is_cut_to_fit_is_not_too_long(tokenizer: MessageBus) -> None:
    text = TextPrompt(text="word " * 10_000)
    answer = await ask(tokenizer, text, max_tokens=LIMIT, truncate_prompt_tokens=LIMIT)
    assert isinstance(answer, Tokenized)
    assert (count_ids(answer.token_ids), answer.too_many) == (LIMIT, 0)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt(text="word " * 10_000), "prompt"),
        (
            ChatPrompt(
                messages_json=b'[{"role": "user", "content": "' + b"word " * 10_000 + b'"}]'
            ),
            "messages",
        ),
    ],
)
async def test_a_prompt_that_can_never_fit_is_refused_by_its_length(
    tokenizer: MessageBus, prompt: TextPrompt | ChatPrompt, param: str
) -> None:
    with pytest.raises(PromptTooLong, match="at least") as caught:
        await ask(tokenizer, prompt, max_tokens=LIMIT)
    assert caught.value.param == param
