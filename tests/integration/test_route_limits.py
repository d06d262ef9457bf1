"""Every route counts against its tenant's limits, except those that are listed here."""

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tokenmesh.services.gateway import document
from tokenmesh.services.gateway.core.tenancy.auth import OPEN_PATHS
from tokenmesh.services.gateway.core.tenancy.reads import Reads
from tokenmesh.services.gateway.core.tenancy.tenant import Tenant
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import Overloaded

EXEMPT = {
    ("GET", "/"),
    ("GET", "/console"),
    ("GET", "/api/ps"),
    ("GET", "/api/tags"),
    ("GET", "/api/version"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("GET", "/docs"),
    ("GET", "/docs/{name}"),
    ("GET", "/health"),
    ("GET", "/is_sleeping"),
    ("GET", "/livez"),
    ("GET", "/load"),
    ("GET", "/mesh"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/ping"),
    ("GET", "/readyz"),
    ("GET", "/redoc"),
    ("GET", "/server_info"),
    ("GET", "/traces"),
    ("GET", "/traces/{trace_or_request_id}"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/v1/responses/{response_id}"),
    ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/v1/usage"),
    ("GET", "/v1/usage/tenants"),
    ("GET", "/version"),
    ("DELETE", "/v1/files/{file_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/mesh/{process_id}/drain"),
    ("DELETE", "/adapters/{adapter_name}"),
    ("POST", "/adapters"),
    ("POST", "/sleep"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/wake_up"),
}
"""A route that is to be limited does not belong here, and one that is not needs a reason."""


class Rig:
    """A gateway with a tenant that may send one request, and one that may have two sequences."""

    def __init__(self, mesh: BackEnd, mark: str) -> None:
        self.mesh = mesh
        self._mark = mark

    def key(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer sk-{tenant}-{self._mark}"}

    def client(self, tenant: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.mesh.url, headers=self.key(tenant), timeout=10)


@pytest.fixture
async def rig(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[Rig]:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    limits = {"one": "requests_per_minute = 1", "two": "max_concurrent = 2"}
    lines = [f"[tenants.{name}-{mark}]\n{limit}" for name, limit in limits.items()]
    lines += [key_entry(f"sk-{name}-{mark}", f"{name}-{mark}") for name in limits]
    path.write_text("\n".join(lines))
    async with BackEnd(
        bus_settings, redis_settings, keys_file=path, admin_routes=True, tokenizer_info=True
    ) as mesh:
        yield Rig(mesh, mark)


async def test_every_route_but_the_listed_ones_is_refused_over_the_limit(rig: Rig) -> None:
    async with rig.client("one") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        routes = {(method.upper(), path) for path, found in paths.items() for method in found}
        routes |= {("GET", "/console"), ("GET", "/openapi.json")}
        assert ("POST", "/v1/chat/completions") in routes
        (await client.post("/v1/completions", json={"model": rig.mesh.model, "prompt": "a"}))
        refused = set()
        for method, path in sorted(routes):
            url = "/".join("x" if each[:1] == "{" else each for each in path.split("/"))
            if (await client.request(method, url)).status_code == 429:
                refused.add((method, path))
    assert routes - refused == routes & EXEMPT
    for path in ("/tokenize", "/detokenize", "/v1/files", "/v1/messages/count_tokens"):
        assert ("POST", path) in refused


async def routes_of(client: httpx.AsyncClient) -> set[tuple[str, str]]:
    paths = (await client.get("/openapi.json")).json()["paths"]
    routes = {(method.upper(), path) for path, found in paths.items() for method in found}
    hidden = ("/console", "/console/events", "/openapi.json", "/docs", "/redoc")
    return routes | {("GET", path) for path in hidden}


async def test_every_route_but_probes_and_the_consoles_page_has_a_limit(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    limits = {"one": "requests_per_minute = 1", "other": ""}
    lines = [f"[tenants.{name}-{mark}]\n{limit}" for name, limit in limits.items()]
    lines += [key_entry(f"sk-{name}-{mark}", f"{name}-{mark}") for name in limits]
    path.write_text("\n".join(lines))
    async with BackEnd(
        bus_settings, redis_settings, keys_file=path, admin_routes=True, reads_per_minute=2
    ) as mesh:
        rig, refused = Rig(mesh, mark), set()
        async with rig.client("one") as client, rig.client("other") as other:
            routes = await routes_of(other)
            await client.post("/v1/completions", json={"model": mesh.model, "prompt": "a"})
            for _ in range(2):
                assert (await client.get("/v1/models")).status_code == 200
            for method, found in sorted(routes):
                url = "/".join("x" if each[:1] == "{" else each for each in found.split("/"))
                answer = await client.request(method, url)
                if answer.status_code != 429:
                    continue
                refused.add((method, found))
                assert int(answer.headers["retry-after"]) >= 1
                if (method, found) in EXEMPT:
                    assert "gateway.reads_per_minute = 2" in answer.text
            assert {path for _, path in routes - refused} == OPEN_PATHS & {
                path for _, path in routes
            }
            assert (await other.get("/v1/models")).status_code == 200, "reads of another tenant"


async def test_a_tenants_reads_wait_for_each_other_but_not_for_streams(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings, redis_settings, max_reads=1) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
    ):
        mesh.workers[0].hold()
        body = {"model": mesh.model, "input": "Hi", "background": True}
        begun = (await client.post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{begun['id']}"
        async with client.stream("GET", path, params={"stream": True}) as stream:
            assert stream.status_code == 200
            answers = await asyncio.gather(*(client.get(path) for _ in range(20)))
            assert {each.status_code for each in answers} == {200}
            mesh.workers[0].release(4096)
            assert "response.completed" in (await stream.aread()).decode()


async def test_a_wait_that_is_too_long_is_refused_by_the_settings_name() -> None:
    reads, tenant = Reads(GatewaySettings(max_reads=1)), Tenant(name="a")
    place = await reads.take(tenant)
    waiting = [asyncio.create_task(reads.take(tenant)) for _ in range(5000)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(Overloaded, match=r"gateway.max_reads = 1 .* at a time"):
        done.pop().result()
    reads.release(await reads.take(Tenant(name="b")))
    reads.release(place)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_document_of_the_routes_is_made_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    build = document.body_components

    def body_components(models: Any) -> dict[str, Any]:
        made.append(threading.current_thread())
        return build(models)

    monkeypatch.setattr(document, "body_components", body_components)
    async with rig.client("two") as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(8)))
    assert len({each.content for each in answers}) == 1
    assert len(made) == 1
    assert made != [threading.main_thread()], "it would hold the event loop"


async def test_a_websocket_is_refused_over_the_limit(rig: Rig) -> None:
    url = rig.mesh.url.replace("http", "ws") + "/v1/realtime"
    async with connect(url, additional_headers=rig.key("one")) as socket:
        assert json.loads(await socket.recv())["type"] == "session.created"
        await socket.send(json.dumps({"type": "response.create"}))
        error = json.loads(await socket.recv())["error"]
        assert error["code"] == "rate_limit_exceeded"
    with pytest.raises(InvalidStatus) as caught:
        async with connect(url, additional_headers=rig.key("one")):
            pass
    assert caught.value.response.status_code == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 3}),
        ("/v1/completions", {"prompt": ["a", "b", "c"]}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "a"}]] * 3}),
    ],
)
async def test_each_choice_counts_as_a_sequence(
    rig: Rig, path: str, body: dict[str, object]
) -> None:
    async with rig.client("two") as client:
        for _ in range(2):
            refused = await client.post(path, json={"model": rig.mesh.model, **body})
            assert refused.status_code == 400
            assert "3 sequences" in refused.json()["error"]["message"]
        fits = {"model": rig.mesh.model, "prompt": "a", "n": 2}
        assert (await client.post("/v1/completions", json=fits)).status_code == 200
