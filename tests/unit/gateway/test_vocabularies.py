"""A tokenizer's description is refreshed; its text is loaded only when it has changed."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fakes.tokenizers import byte_level_bpe
from tokenmesh.services.gateway.core.mesh.calls import ServiceCalls
from tokenmesh.services.gateway.core.mesh.vocabularies import Vocabularies
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import NoResponders, ProtocolError
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages import Described, ReadTokenizer, TokenizerRead

MODEL = ModelName("m")


class Tokenizers:
    """A fake of `ServiceCalls`."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.part_bytes = 1000
        self.fingerprint = "one"
        self.defaults = b'{"top_k": 7}'
        self.is_away = False
        self.num_requests = 0
        self.num_fetched = 0

    async def request(
        self, _subject: str, message: object, *_: object, **__: object
    ) -> Described | TokenizerRead:
        if isinstance(message, ReadTokenizer):
            return self.read(message)
        self.num_requests += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise NoResponders("no tokenizer")
        return Described(
            fingerprint=self.fingerprint,
            vocab_size=400,
            special_ids=[0],
            has_chat_template=True,
            default_sampling_json=self.defaults,
        )

    def read(self, message: ReadTokenizer) -> TokenizerRead:
        assert message.fingerprint == self.fingerprint
        part = self.text[message.offset : message.offset + self.part_bytes]
        self.num_fetched += message.offset + len(part) == len(self.text)
        return TokenizerRead(data=part, num_bytes=len(self.text))


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = byte_level_bpe(tmp_path_factory.mktemp("bpe"))
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


def made(text: str, **limits: Any) -> tuple[Vocabularies, Tokenizers]:
    service = Tokenizers(text)
    settings = GatewaySettings(**limits)
    return Vocabularies(cast("ServiceCalls", service), settings), service


async def until(vocabularies: Vocabularies, service: Tokenizers, num_requests: int) -> None:
    async with asyncio.timeout(15):
        while service.num_requests < num_requests:
            await vocabularies.get(MODEL)
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)


async def test_concurrent_requests_share_one_load(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json)
    texts = await asyncio.gather(*(vocabularies.get(MODEL) for _ in range(5)))
    assert (service.num_requests, service.num_fetched) == (1, 1)
    assert texts[0].defaults == {"top_k": 7}
    assert all(text is texts[0] for text in texts)


@pytest.mark.parametrize(("part_bytes", "limit"), [(0, 1 << 20), (1000, 1000)])
async def test_a_text_that_does_not_end_or_is_too_large_is_refused(
    tokenizer_json: str, part_bytes: int, limit: int
) -> None:
    vocabularies, service = made(tokenizer_json, max_tokenizer_bytes=limit)
    service.part_bytes = part_bytes
    with pytest.raises(ProtocolError, match=f"a text of {len(service.text)} bytes"):
        await vocabularies.get(MODEL)


async def test_a_tokenizer_that_is_not_utf8_is_a_protocol_error(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json)
    service.text = b"\xff" * 2500
    with pytest.raises(ProtocolError, match="is not UTF-8"):
        await vocabularies.get(MODEL)


async def test_an_unchanged_tokenizer_is_not_fetched_again(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json, describe_ttl_s=0.001)
    before = await vocabularies.get(MODEL)
    await until(vocabularies, service, 3)
    after = await vocabularies.get(MODEL)
    assert service.num_fetched == 1
    assert after.vocabulary is before.vocabulary


async def test_a_changed_tokenizer_is_fetched(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json, describe_ttl_s=0.001)
    await vocabularies.get(MODEL)
    service.fingerprint = "two"
    async with asyncio.timeout(15):
        while (await vocabularies.get(MODEL)).described.fingerprint != "two":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert service.num_fetched == 2


async def test_the_old_tokenizer_is_used_while_no_service_answers(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json, describe_ttl_s=0.001)
    await vocabularies.get(MODEL)
    service.is_away = True
    await until(vocabularies, service, 3)
    assert (await vocabularies.get(MODEL)).described.fingerprint == "one"


async def test_a_failed_first_load_is_repeated(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json)
    service.is_away = True
    with pytest.raises(NoResponders):
        await vocabularies.get(MODEL)
    service.is_away = False
    assert (await vocabularies.get(MODEL)).described.fingerprint == "one"


async def test_the_cache_is_bounded(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json, max_vocabularies=1)
    for name in ("a", "b", "a"):
        await vocabularies.get(ModelName(name))
    assert service.num_fetched == 3


async def test_defaults_that_are_not_json_are_a_protocol_error(tokenizer_json: str) -> None:
    vocabularies, service = made(tokenizer_json)
    service.defaults = b"nonsense"
    with pytest.raises(ProtocolError):
        await vocabularies.get(MODEL)
