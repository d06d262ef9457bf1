"""/inference/v1/abort_requests: running and waiting requests end, those of other tenants do not."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, fake_tokenizer
from tests.fakes.key_file import key_entry
from tests.fakes.service_mesh import running
from tests.fakes.three_calls import GENERATE, events_of
from tests.servers import free_port
from tokenmesh.services.gateway.main import build
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

ABORT = "/inference/v1/abort_requests"
PROMPT = fake_tokenizer().encode("Once upon").ids


class Rig:
    """Two tenants of one gateway."""

    def __init__(self, mesh: BackEnd, mark: str) -> None:
        self.mesh = mesh
        self._mark = mark

    def client(self, tenant: str, url: str = "") -> httpx.AsyncClient:
        key = {"authorization": f"Bearer sk-{tenant}-{self._mark}"}
        return httpx.AsyncClient(base_url=url or self.mesh.url, headers=key, timeout=10)

    def body(self, **fields: Any) -> dict[str, Any]:
        own = {"model": self.mesh.model, "token_ids": PROMPT, "request_id": "r-1"}
        return {**own, "sampling_params": {"n": 2}, **fields}

    async def abort(self, tenant: str, *ids: str, url: str = "") -> int:
        async with self.client(tenant, url) as client:
            return (await client.post(ABORT, json={"request_ids": list(ids)})).status_code


@pytest.fixture
async def rig(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[Rig]:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    tenants = [f"[tenants.{name}-{mark}]" for name in ("own", "other")]
    keys = [key_entry(f"sk-{name}-{mark}", f"{name}-{mark}") for name in ("own", "other")]
    path.write_text("\n".join([*tenants, *keys]))
    back_end = BackEnd(bus_settings, redis_settings, scale_out=True, keys_file=path)
    back_end.step_s = 0.1
    async with back_end:
        yield Rig(back_end, mark)


async def test_an_aborted_answer_has_the_tokens_so_far(rig: Rig) -> None:
    async with rig.client("own") as client:
        answer = asyncio.create_task(client.post(GENERATE, json=rig.body()))
        worker = rig.mesh.workers[0]
        await rig.mesh.until(lambda: any(run.sent for run in worker.runs.values()))
        assert await rig.abort("other", "r-1") == 200
        assert await rig.abort("own", "r-2", "generate-tokens-r-1") == 200
        body = (await answer).json()
    assert [each["finish_reason"] for each in body["choices"]] == ["abort", "abort"]
    assert 0 < body["usage"]["completion_tokens"] < 20
    await rig.mesh.until(lambda: len(worker.cancels) == 2)


async def test_another_tenants_request_continues(rig: Rig) -> None:
    rig.mesh.workers[0].step_s = 0.01
    rig.mesh.workers[0].hold()
    async with rig.client("own") as client:
        answer = asyncio.create_task(client.post(GENERATE, json=rig.body()))
        await rig.mesh.until(lambda: len(rig.mesh.workers[0].runs) == 2)
        assert await rig.abort("other", "r-1") == 200
        await asyncio.sleep(0.1)
        rig.mesh.workers[0].release(burst=10)
        body = (await answer).json()
    assert [each["finish_reason"] for each in body["choices"]] == ["stop", "stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_for_a_worker_can_be_aborted(rig: Rig, stream: bool) -> None:
    rig.mesh.scheduler.delay_s = 5.0
    async with rig.client("own") as client:
        body = rig.body(stream=stream)
        answer = asyncio.create_task(client.post(GENERATE, json=body))
        await rig.mesh.until(lambda: bool(rig.mesh.scheduler.received))
        assert await rig.abort("own", "r-1") == 200
        response = await asyncio.wait_for(answer, 15)
    assert response.status_code == 200
    chunks = events_of(response) if stream else [response.json()]
    reasons = [choice["finish_reason"] for each in chunks for choice in each["choices"]]
    assert reasons == ["abort", "abort"]
    assert response.text.endswith("[DONE]\n\n") is stream


async def test_any_gateway_accepts_an_abort(rig: Rig) -> None:
    settings = changed(rig.mesh.settings, {"gateway": {"port": free_port()}})
    url = f"http://127.0.0.1:{settings.gateway.port}"
    async with running("gateway", settings, build), rig.client("own") as client:
        answer = asyncio.create_task(client.post(GENERATE, json=rig.body(stream=True)))
        worker = rig.mesh.workers[0]
        await rig.mesh.until(lambda: any(run.sent for run in worker.runs.values()))
        assert await rig.abort("own", "r-1", url=url) == 200
        events = events_of(await answer)
    assert {each["choices"][0]["finish_reason"] for each in events[-2:]} == {"abort"}


async def test_wrong_aborts_are_refused(rig: Rig) -> None:
    async with rig.client("own") as client:
        for body in ({}, {"request_ids": "r-1"}, {"request_ids": [""]}):
            assert (await client.post(ABORT, json=body)).status_code == 400
        many = await client.post(ABORT, json={"request_ids": ["r"] * 1025})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "request_ids")
