"""The same for a real tokenizer and a real encoder: what they listen to is only theirs."""

import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.fakes.hostile_bus import FOREIGN, attack, concrete, listened, noted
from tests.fakes.images import data_uri, image_file, picture
from tests.fakes.llava import llava
from tests.fakes.service_mesh import running
from tokenmesh.services.mm_encoder_svc.main import build as build_encoder
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import EncoderSettings, ModelSettings
from tokenmesh.shared.ids import ModelName, RequestId
from tokenmesh.shared.messages import Encode, Encoded
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize, Tokenized
from tokenmesh.shared.service import Mesh

PATIENCE_S = 15.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
async def services(
    checkpoint: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[dict[str, Mesh]]:
    name = ModelName(f"llava-{secrets.token_hex(4)}")
    model = ModelSettings(model=str(checkpoint), served_model_name=(name,), dtype="float32")
    settings = Settings(
        models=(model,),
        bus=bus_settings,
        redis=redis_settings,
        encoder=EncoderSettings(device="cpu"),
    )
    async with (
        running("tokenizer", settings, build_tokenizer) as tokenizer,
        running("encoder", settings, build_encoder) as encoder,
    ):
        yield {"tokenizer": tokenizer, "encoder": encoder}


async def encoded(bus: MessageBus, mesh: Mesh) -> tuple[bytes, list[Any]]:
    """A chat with an image, by both: its ids, and where its embeddings are."""
    model, request = ModelName(mesh.settings.models[0].name), RequestId("r")
    url = {"url": data_uri(image_file(picture(1, 50, 40)))}
    content = ["see", {"type": "image_url", "image_url": url}]
    messages = msgspec.json.encode([{"role": "user", "content": content}])
    ask = Tokenize(request_id=request, model=model, prompt=ChatPrompt(messages_json=messages))
    limit_s = now_s() + PATIENCE_S
    tokenized = await bus.request(subjects.tokenize(model), ask, deadline_s=limit_s)
    assert isinstance(tokenized, Tokenized)
    question = Encode(request_id=request, model=model, items=tokenized.media)
    answer = await bus.request(subjects.encode(model), question, deadline_s=limit_s)
    assert isinstance(answer, Encoded)
    return tokenized.token_ids, [item.embeddings for item in answer.items]


@pytest.mark.parametrize("name", ["tokenizer", "encoder"])
async def test_nothing_on_its_subjects_does_harm(
    services: dict[str, Mesh], bus: MessageBus, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    service, rng = services[name], Random(name)
    expected = await encoded(bus, service)
    before, expected_notes, num_own = noted(service), 0, 0
    for subject in listened(service):
        count = await attack(bus, concrete(subject), rng, service)
        if not subject.startswith(FOREIGN):
            expected_notes += count
            num_own += name[:6] in subject or "encode" in subject or "tokenize" in subject
    assert num_own > 0, listened(service)
    assert noted(service) - before >= expected_notes
    assert await encoded(bus, service) == expected
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
    assert all(len(each.getMessage()) < 2000 for each in caplog.records)
