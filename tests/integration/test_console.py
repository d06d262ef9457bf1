"""The console's routes: what a page follows, for admins and for tenants, and its bounds."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

MARK = secrets.token_hex(4)
ANN, BOB = f"ann-{MARK}", f"bob-{MARK}"


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{key}"}


@pytest.fixture
async def mesh(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[BackEnd]:
    path = tmp_path / "keys.toml"
    lines = ["[tenants.boss]\nadmin = true"]
    lines += [f"[tenants.{name}]\nrequests_per_minute = 5" for name in (ANN, BOB)]
    path.write_text("\n".join([*lines, *(key_entry(f"sk-{n}", n) for n in ("boss", ANN, BOB))]))
    async with BackEnd(
        bus_settings,
        redis_settings,
        keys_file=path,
        max_console_pages=3,
        max_console_pages_per_tenant=2,
        console_interval_s=0.1,
    ) as back_end:
        back_end.workers[0].step_s = 0.05
        yield back_end


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as found:
        yield found


class Follower:
    """A page that is open: the states that it was sent."""

    def __init__(self, client: httpx.AsyncClient, key: str) -> None:
        self._stream = client.stream("GET", "/console/events", headers=headers(key))

    async def __aenter__(self) -> "Follower":
        self._response = await self._stream.__aenter__()
        self.status = self._response.status_code
        self._lines = self._response.aiter_lines()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(15):
            async for line in self._lines:
                if line.startswith("data: "):
                    return dict(msgspec.json.decode(line.removeprefix("data: ")))
        raise AssertionError("the stream has ended")

    async def ended(self) -> None:
        async with asyncio.timeout(15):
            async for _ in self._lines:
                pass

    async def until_running(self) -> dict[str, Any]:
        while True:
            newest = (await self.next())["requests"]["newest"]
            if newest and newest[0]["output_tokens"]:
                return dict(newest[0])


async def test_the_page_needs_no_key_and_its_events_do(client: httpx.AsyncClient) -> None:
    page = await client.get("/console")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for name in ("app.js", "app.css", "icon.svg"):
        assert (await client.get(f"/console/{name}")).status_code == 200
    root = await client.get("/")
    assert (root.status_code, root.headers["location"]) == (307, "/console")
    for path in ("/console/events", "/console/other.js", "/traces"):
        assert (await client.get(path)).status_code == 401
    missing = await client.get("/console/other.js", headers=headers("boss"))
    assert missing.status_code == 404
    foreign = headers("boss") | {"sec-fetch-site": "cross-site"}
    assert (await client.get("/console/events", headers=foreign)).status_code == 403


async def test_an_admin_sees_the_mesh(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    async with Follower(client, "boss") as page:
        state = await page.next()
    assert (state["is_admin"], state["can_manage"], state["tenant"]) == (True, False, "boss")
    assert mesh.model in [each["name"] for each in state["models"]]
    found = state["mesh"]
    assert mesh.workers[0].id in [each["id"] for each in found["processes"]]
    assert found["num_processes"] == len(found["processes"])
    assert found["health"]["workers"] >= 1
    assert found["health"]["errors"] == 0


async def test_a_tenant_sees_its_running_requests_and_nothing_else(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    body = {"model": mesh.model, "prompt": "a", "max_tokens": 60}
    sending = asyncio.create_task(
        client.post("/v1/completions", json=body, headers=headers(ANN) | {"x-request-id": "mine"})
    )
    async with Follower(client, ANN) as ann, Follower(client, BOB) as bob:
        row = await ann.until_running()
        assert (row["id"], row["path"], row["tenant"]) == ("mine", "/v1/completions", ANN)
        assert (row["phase"], row["model"]) == ("generating", mesh.model)
        assert row["workers"] == [mesh.workers[0].id]
        assert 0 < row["output_tokens"] <= row["max_tokens"] == 60
        state = await bob.next()
        assert state["mesh"] is None
        assert state["requests"] == {"total": 0, "newest": []}
    async with Follower(client, "boss") as boss:
        if not sending.done():
            assert (await boss.next())["requests"]["total"] == 1
    assert (await sending).status_code == 200


async def test_an_unchanged_state_is_sent_once(mesh: BackEnd, client: httpx.AsyncClient) -> None:
    async with Follower(client, ANN) as page:
        first = await page.next()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await page.next()
    once = await client.get("/console/events?limit=1", headers=headers(ANN))
    assert msgspec.json.decode(once.text.removeprefix("data: ")) == first


async def test_pages_are_bounded_for_a_tenant_and_in_all(client: httpx.AsyncClient) -> None:
    async with Follower(client, ANN), Follower(client, ANN):
        async with Follower(client, ANN) as third:
            assert third.status == 429
        async with Follower(client, BOB) as other:
            assert other.status == 200
            async with Follower(client, "boss") as too_many:
                assert too_many.status == 429
    for _ in range(300):
        async with Follower(client, "boss") as again:
            if again.status == 200:
                return
        await asyncio.sleep(0.05)
    raise AssertionError("closed pages still count")


async def test_open_pages_do_not_count_as_requests_and_end_with_the_gateway(
    mesh: BackEnd, client: httpx.AsyncClient
) -> None:
    for _ in range(6):
        answer = await client.get("/console/events?limit=1", headers=headers(BOB))
        assert answer.status_code == 200
    body = {"model": mesh.model, "prompt": "a", "max_tokens": 1}
    assert (
        await client.post("/v1/completions", json=body, headers=headers(BOB))
    ).status_code == 200
    async with Follower(client, BOB) as page:
        await page.next()
        mesh.gateway.core.draining.set()
        await page.ended()
