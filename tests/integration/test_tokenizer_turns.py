"""Tenants take turns at a tokenizer, and what cannot fit a model costs nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings, TokenizerSettings
from tokenmesh.shared.errors import PromptTooLong
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import Detokenize, Detokenized
from tokenmesh.shared.messages.tokenize import TextPrompt, Tokenize, Tokenized
from tokenmesh.shared.tokens import pack_ids, unpack_ids

MODEL = ModelName("turns")
LONG = "The quick brown fox " * 10_000
SHORT = "The quick brown fox " * 45


class Client:
    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus

    async def tokenize(self, tenant: str, text: str, **fields: object) -> list[int]:
        message = Tokenize(
            request_id=RequestId("r"),
            model=MODEL,
            prompt=TextPrompt(text=text),
            tenant=tenant,
            **fields,  # type: ignore[arg-type]
        )
        answer = await self._ask(message)
        assert isinstance(answer, Tokenized)
        return unpack_ids(answer.token_ids)

    async def detokenize(self, tenant: str, ids: list[int]) -> str:
        message = Detokenize(
            request_id=RequestId("r"), model=MODEL, token_ids=pack_ids(ids), tenant=tenant
        )
        answer = await self._ask(message)
        assert isinstance(answer, Detokenized)
        return answer.text

    async def _ask(self, message: Tokenize | Detokenize) -> object:
        return await self._bus.request(subjects.tokenize(MODEL), message, deadline_s=now_s() + 15)


@pytest.fixture
async def client(
    tmp_path: Path, bus_settings: BusSettings, redis_settings: RedisSettings, bus: MessageBus
) -> AsyncIterator[Client]:
    directory = byte_level_bpe(tmp_path)
    settings = Settings(
        models=(ModelSettings(model=str(directory), served_model_name=(MODEL,)),),
        tokenizer=TokenizerSettings(threads=1),
        bus=bus_settings,
        redis=redis_settings,
    )
    async with running("tokenizer", settings, build):
        yield Client(bus)


async def test_a_tenant_does_not_wait_for_all_that_another_has_sent(client: Client) -> None:
    flood = [asyncio.create_task(client.tokenize("b", LONG)) for _ in range(12)]
    while not any(task.done() for task in flood):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    ids = await client.tokenize("a", SHORT)
    assert await client.detokenize("a", ids) == SHORT
    assert sum(task.done() for task in flood) <= 6
    await asyncio.gather(*flood)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []

    def ids(encoder: object, text: str, *_: object) -> list[int]:
        encoded.append(text)
        return [1]

    monkeypatch.setattr(TextEncoder, "ids", ids)
    for limit in ("context_tokens", "max_tokens"):
        with pytest.raises(PromptTooLong, match="at least"):
            await client.tokenize("b", LONG, **{limit: 2048})
    assert encoded == []
    await client.tokenize("b", LONG, context_tokens=2048, truncate_prompt_tokens=10)
    await client.tokenize("b", LONG)
    assert encoded == [LONG, LONG]
