"""Embeddings and scores through real services are those of transformers."""

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


def write_tokenizer(directory: Path) -> None:
    """BERT's, with the words of the corpus."""
    words = sorted({word for text in CORPUS for word in text.lower().split() if word.isascii()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *words]), encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    write_json(directory / "tokenizer_config.json", config)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny BERT with mean pooling, as sentence-transformers ships one."""
    directory = tmp_path / "embedder"
    model = make_pooler(ENCODERS["bert"], "Model", add_pooling_layer=False)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    write_modules(directory)
    prompts = {"prompts": {"query": "quick "}}
    write_json(directory / "config_sentence_transformers.json", prompts)
    return directory


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    """A tiny BERT that scores pairs."""
    directory = tmp_path / "scorer"
    model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=1)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
async def client(
    checkpoint: Path, scorer: Path, bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[httpx.AsyncClient]:
    port = free_port()
    models = (
        ModelSettings(model=str(checkpoint), served_model_name=("embedder",)),
        ModelSettings(model=str(scorer), served_model_name=("scorer",)),
    )

    def serving(*models: ModelSettings) -> Settings:
        return Settings(
            models=models,
            bus=bus_settings,
            redis=redis_settings,
            gateway=GatewaySettings(port=port),
            worker=WorkerSettings(),
        )

    async with AsyncExitStack() as stack:
        for service, settings, build in (
            ("worker", serving(models[0]), build_worker),
            ("worker", serving(models[1]), build_worker),
            ("scheduler", serving(*models), build_scheduler),
            ("tokenizer", serving(*models), build_tokenizer),
            ("gateway", serving(*models), build_gateway),
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


async def test_embeddings_are_those_of_transformers(
    checkpoint: Path, scorer: Path, client: httpx.AsyncClient
) -> None:
    model = "embedder"
    answer = await post(client, "/v1/embeddings", model=model, input=TEXTS)
    found = torch.tensor([each["embedding"] for each in answer["data"]])
    wanted = expected(checkpoint, TEXTS)
    assert (found - wanted).abs().max() < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokenizer(TEXTS)["input_ids"]))

    answer = await post(client, "/score", model=model, text_1=TEXTS[0], text_2=TEXTS)
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx((wanted @ wanted[0]).tolist(), abs=1e-5)

    answer = await post(
        client, "/v2/embed", model=model, texts=["the fox"], input_type="search_query"
    )
    found = torch.tensor(answer["embeddings"]["float"])
    assert (found - expected(checkpoint, ["quick the fox"])).abs().max() < 1e-5

    answer = await post(client, "/pooling", model=model, input="the fox", task="token_embed")
    assert len(answer["data"][0]["data"]) == len(tokenizer("the fox")["input_ids"])

    tasks: dict[str, list[str]] = {}
    while "scorer" not in tasks:  # the gateway may not have heard of it yet
        listed = (await client.get("/v1/models")).json()["data"]
        tasks = {each["id"]: each["tasks"] for each in listed}
    assert "embed" in tasks["embedder"]
    assert "score" in tasks["scorer"]
    assert "generate" not in tasks["embedder"] + tasks["scorer"]
    for body, param, code in (
        ({"input": "the " * 200}, "input", "context_length_exceeded"),
        ({"input": "the", "dimensions": 8}, "dimensions", "invalid_request_error"),
    ):
        response = await client.post("/v1/embeddings", json={"model": model, **body})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    await check_pairs(scorer, client)


async def check_pairs(scorer: Path, client: httpx.AsyncClient) -> None:
    """Pairs have the scores that transformers gives them, with their types of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    torch_model = make_pooler(ENCODERS["bert"], "ForSequenceClassification", num_labels=1)
    wanted = []
    with torch.no_grad():
        for text in TEXTS:
            pair = tokenizer("the fox", text, return_tensors="pt")
            wanted.append(torch.sigmoid(torch_model(**pair).logits[0, 0]).item())
    fields: dict[str, Any] = {"model": "scorer", "query": "the fox", "documents": TEXTS}
    answer = await post(client, "/rerank", **fields)
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert [found[index] for index in range(len(TEXTS))] == pytest.approx(wanted, abs=1e-5)
    ranks = [each["relevance_score"] for each in answer["results"]]
    assert ranks == sorted(ranks, reverse=True)
