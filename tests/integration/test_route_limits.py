"""Every route counts against its tenant's limits, except those that are listed here."""

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

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
