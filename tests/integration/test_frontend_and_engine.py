"""A frontend (gateway and tokenizer) and an engine (gateway, scheduler, worker) on two buses."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.fakes.service_mesh import running
from tests.fakes.three_calls import CHAT, GENERATE, events_of
from tests.servers import Server, bus_settings_of, free_port
from tokenmesh.services.gateway.main import build as build_gateway
from tokenmesh.services.scheduler_svc.main import build as build_scheduler
from tokenmesh.services.tokenizer_svc.main import build as build_tokenizer
from tokenmesh.services.worker_svc.main import build as build_worker
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.loader import DEMO_MODEL
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings

MODEL = "demo"
Clients = tuple[httpx.AsyncClient, httpx.AsyncClient]


@pytest.fixture
async def clients(
    start_nats: Callable[[], Server], bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[Clients]:
    """Yield clients of the frontend and of the engine, which share neither a bus nor a process."""
    models = (ModelSettings(model=str(DEMO_MODEL), served_model_name=(MODEL,)),)
    front = Settings(
        models=models,
        bus=bus_settings_of(start_nats()),
        redis=redis_settings,
        gateway=GatewaySettings(port=free_port(), render_only=True, service_wait_s=0.5),
    )
    back = Settings(
        models=models,
        bus=bus_settings,
        redis=redis_settings,
        gateway=GatewaySettings(port=free_port(), tokens_only=True),
        worker=WorkerSettings(engine="sim", sim_step_s=0.001),
    )
    async with AsyncExitStack() as stack:
        for service, settings, build in (
            ("gateway", front, build_gateway),
            ("tokenizer", front, build_tokenizer),
            ("gateway", back, build_gateway),
            ("scheduler", back, build_scheduler),
            ("worker", back, build_worker),
        ):
            await stack.enter_async_context(running(service, settings, build))
        urls = [f"http://127.0.0.1:{each.gateway.port}" for each in (front, back)]
        made = [httpx.AsyncClient(base_url=url, timeout=10) for url in urls]
        for client in made:
            await stack.enter_async_context(client)
        yield made[0], made[1]


async def post(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


async def test_a_frontend_without_an_engine_and_an_engine_without_a_tokenizer(
    clients: Clients,
) -> None:
    front, engine = clients
    for client in clients:
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "seed": 3,
        "max_tokens": 12,
        "logprobs": True,
    }
    request = (await post(front, f"{CHAT}/render", body)).json()
    whole = (await post(engine, GENERATE, request)).json()
    derender = {
        "generate_response": whole,
        "prompt_token_ids": request["token_ids"],
        "chat_request": body,
    }
    answer = (await post(front, f"{CHAT}/derender", derender)).json()
    assert answer["usage"]["prompt_tokens"] == len(request["token_ids"])
    assert answer["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] > 0
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text = tokenizer.decode(whole["choices"][0]["token_ids"])
    assert answer["choices"][0]["message"]["content"] == text
    streamed = events_of(await post(engine, GENERATE, {**request, "stream": True}))
    ids = [each for event in streamed for each in event["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert (await front.post(CHAT, json=body)).status_code in (404, 503)
