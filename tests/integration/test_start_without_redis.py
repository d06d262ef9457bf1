"""Processes that start while Redis is away serve text all the same."""

import json
from pathlib import Path

import httpx

from tests.fakes.back_end import BackEnd
from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import byte_level_bpe
from tests.servers import free_port
from tokenmesh.services.tokenizer_svc.main import build
from tokenmesh.shared import subjects
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.ids import ModelName
from tokenmesh.shared.messages import Describe, Described, ReadTokenizer, TokenizerRead


async def test_a_gateway_answers(bus_settings: BusSettings) -> None:
    away = RedisSettings(url=f"redis://127.0.0.1:{free_port()}/0")
    async with (
        BackEnd(bus_settings, away) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        chat = {"model": mesh.model, "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"].startswith("Hello")


async def test_a_tokenizer_tells_its_text(
    tmp_path: Path, bus_settings: BusSettings, bus: MessageBus
) -> None:
    model = ModelName("bpe")
    settings = Settings(
        models=(ModelSettings(model=str(byte_level_bpe(tmp_path)), served_model_name=(model,)),),
        bus=bus_settings,
        redis=RedisSettings(url=f"redis://127.0.0.1:{free_port()}/0"),
    )
    subject = subjects.tokenize(model)
    async with running("tokenizer", settings, build):
        described = await bus.request(subject, Describe(model=model), deadline_s=now_s() + 10)
        assert isinstance(described, Described)
        question = ReadTokenizer(model=model, fingerprint=described.fingerprint)
        answer = await bus.request(subject, question, deadline_s=now_s() + 10)
    assert isinstance(answer, TokenizerRead)
    shown, written = json.loads(answer.data), json.loads((tmp_path / "tokenizer.json").read_text())
    assert shown["model"]["vocab"] == written["model"]["vocab"]
