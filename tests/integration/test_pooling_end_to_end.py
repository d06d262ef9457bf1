"""Embeddings through real services are those of transformers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.fakes.poolers import ENCODERS, make_pooler, write_modules
from tests.fakes.service_mesh import running
from tests.fakes.tokenizers import CORPUS, write_json
from tests.servers import free_port
from tokenmesh.services.gateway.main import build as build_gateway
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

TEXTS = [*CORPUS[:3], "the fox", "quick " * 20, "a"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny BERT with mean pooling, as sentence-transformers ships one."""
    words = sorted({word for text in CORPUS for word in text.lower().split() if word.isascii()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *words]), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    write_json(tmp_path / "tokenizer_config.json", config)
    model = make_pooler(ENCODERS["bert"], "Model", add_pooling_layer=False)
    model.save_pretrained(tmp_path)
    write_modules(tmp_path)
    prompts = {"prompts": {"query": "quick "}}
    write_json(tmp_path / "config_sentence_transformers.json", prompts)
    return tmp_path


@pytest.fixture
async def client(
    checkpoint: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    settings = Settings(
        models=(ModelSettings(model=str(checkpoint), served_model_name=("tiny",)),),
        bus=bus_settings,
        redis=redis_settings,
        gateway=GatewaySettings(port=port),
        worker=WorkerSettings(),
    )
    async with AsyncExitStack() as stack:
        for service, build in (
            ("worker", build_worker),
            ("scheduler", build_scheduler),
            ("tokenizer", build_tokenizer),
            ("gateway", build_gateway),
        ):
            await stack.enter_async_context(running(service, settings, build))
        url = f"http://127.0.0.1:{port}"
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))


def expected(checkpoint: Path, texts: list[str]) -> torch.Tensor:
    """Mean of the last states, normalized, each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = make_pooler(ENCODERS["bert"], "Model", add_pooling_layer=False)
    rows = []
    with torch.no_grad():
        for text in texts:
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(states.mean(dim=0), dim=0))
    return torch.stack(rows)


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_numbers_are_those_of_transformers(
    checkpoint: Path, client: httpx.AsyncClient
) -> None:
    answer = await post(client, "/v1/embeddings", input=TEXTS)
    found = torch.tensor([each["embedding"] for each in answer["data"]])
    wanted = expected(checkpoint, TEXTS)
    assert (found - wanted).abs().max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokenizer(TEXTS)["input_ids"]))

    answer = await post(client, "/score", text_1=TEXTS[0], text_2=TEXTS)
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx((wanted @ wanted[0]).tolist(), abs=1e-5)

    answer = await post(client, "/v2/embed", texts=["the fox"], input_type="search_query")
    found = torch.tensor(answer["embeddings"]["float"])
    assert (found - expected(checkpoint, ["quick the fox"])).abs().max() < 1e-5

    answer = await post(client, "/pooling", input="the fox", task="token_embed")
    assert len(answer["data"][0]["data"]) == len(tokenizer("the fox")["input_ids"])

    models = (await client.get("/v1/models")).json()["data"][0]
    assert "embed" in models["tasks"]
    assert "generate" not in models["tasks"]
    response = await client.post("/v1/embeddings", json={"input": "the " * 200})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    response = await client.post("/v1/embeddings", json={"input": "the", "dimensions": 8})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "dimensions")
