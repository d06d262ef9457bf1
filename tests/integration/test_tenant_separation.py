"""Tenants cannot see each other; some routes are for admin keys only."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tests.unit.gateway.test_traces import a_span, packed, trace_id
from tokenmesh.services.gateway.apis.operator.spans import SpanFeed
from tokenmesh.services.gateway.apis.responses.service import Responses
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

PEOPLE = {"ann": "acme", "ada": "acme", "bob": "bolt", "ops": "ops"}
"""Keys, and the tenants they belong to."""


class Rig:
    """A gateway with two tenants and an admin."""

    def __init__(self, mesh: BackEnd, mark: str) -> None:
        self.mesh = mesh
        self.mark = mark

    def tenant(self, who: str) -> str:
        return f"{PEOPLE[who]}-{self.mark}"

    async def ask(self, who: str, method: str, path: str, **more: Any) -> httpx.Response:
        key = {"authorization": f"Bearer sk-{who}-{self.mark}"}
        async with httpx.AsyncClient(base_url=self.mesh.url, headers=key, timeout=10) as client:
            return await client.request(method, path, **more)

    async def respond(self, who: str, **fields: Any) -> httpx.Response:
        body = {"model": self.mesh.model, "input": "Hi", **fields}
        return await self.ask(who, "POST", "/v1/responses", json=body)

    async def chat_about(self, who: str, part: dict[str, Any]) -> httpx.Response:
        messages = [{"role": "user", "content": [part]}]
        body = {"model": self.mesh.model, "messages": messages}
        return await self.ask(who, "POST", "/v1/chat/completions", json=body)


def key_file(mark: str) -> str:
    lines = [
        f"[tenants.acme-{mark}]",
        f"[tenants.bolt-{mark}]",
        f"[tenants.ops-{mark}]\nadmin=true",
        *(key_entry(f"sk-{who}-{mark}", f"{tenant}-{mark}") for who, tenant in PEOPLE.items()),
    ]
    return "\n".join(lines)


@pytest.fixture
async def rig(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> AsyncIterator[Rig]:
    mark = secrets.token_hex(4)
    path = tmp_path / "keys.toml"
    path.write_text(key_file(mark))
    limits: dict[str, Any] = {"keys_file": path, "admin_routes": True}
    async with BackEnd(bus_settings, redis_settings, **limits) as mesh:
        yield Rig(mesh, mark)


async def test_a_response_is_visible_to_its_tenant_and_to_admins(rig: Rig) -> None:
    path = f"/v1/responses/{(await rig.respond('ann')).json()['id']}"
    for who in ("ann", "ada", "ops"):
        assert (await rig.ask(who, "GET", path)).status_code == 200
        assert (await rig.ask(who, "GET", f"{path}/input_items")).status_code == 200
    for method, asked in (
        ("GET", path),
        ("GET", f"{path}?stream=true"),
        ("GET", f"{path}/input_items"),
        ("POST", f"{path}/cancel"),
        ("DELETE", path),
    ):
        assert (await rig.ask("bob", method, asked)).status_code == 404
    assert (await rig.ask("ada", "DELETE", path)).status_code == 200


async def test_a_conversation_is_continued_by_its_tenant_only(rig: Rig) -> None:
    first = (await rig.respond("ann")).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    for who, status in (("ada", 200), ("ops", 200), ("bob", 404)):
        answer = await rig.respond(who, previous_response_id=first["id"])
        assert answer.status_code == status
        assert (await rig.respond(who, input=[reference])).status_code == status
    asked = {"model": rig.mesh.model, "input": "x", "previous_response_id": first["id"]}
    for who, status in (("ada", 200), ("bob", 404)):
        counted = await rig.ask(who, "POST", "/v1/responses/input_tokens", json=asked)
        assert counted.status_code == status


async def test_a_file_is_visible_to_its_tenant_only(rig: Rig) -> None:
    form = {"files": {"file": ("a.png", b"not really an image")}}
    file_id = (await rig.ask("ann", "POST", "/v1/files", **form)).json()["id"]
    image = {"type": "image_url", "image_url": {"url": file_id}}
    path = f"/v1/files/{file_id}"
    for who, status in (("ann", 200), ("ada", 200), ("ops", 200), ("bob", 404)):
        assert (await rig.ask(who, "GET", path)).status_code == status
        assert (await rig.ask(who, "GET", f"{path}/content")).status_code == status
        assert (await rig.chat_about(who, image)).status_code == status
    assert (await rig.chat_about("bob", {"type": "file", "file_id": file_id})).status_code == 404
    assert (await rig.ask("bob", "DELETE", path)).status_code == 404
    assert (await rig.ask("ada", "DELETE", path)).status_code == 200
    assert (await rig.ask("ann", "GET", path)).status_code == 404


async def test_image_uuids_are_separate_for_each_tenant(rig: Rig) -> None:
    for who in ("ann", "bob"):
        await rig.chat_about(who, {"type": "text", "text": "Hi"})
        messages = {"messages": [{"role": "user", "content": "Hi"}], "model": rig.mesh.model}
        await rig.ask(who, "POST", "/tokenize", json=messages)
    shown = [each.tenant for each in rig.mesh.tokenizer.received]
    assert shown == [rig.tenant(who) for who in ("ann", "ann", "bob", "bob")]


async def test_a_trace_is_visible_to_its_tenant_only(rig: Rig) -> None:
    store, tenant = rig.mesh.work(SpanFeed).store, rig.tenant("ann")
    store.add(packed(a_span(1, trace=1, name="http", request_id="mine", tenant=tenant)))
    store.add(packed(a_span(1, trace=2, name="beat")))
    listed = {}
    for who in PEOPLE:
        traces = (await rig.ask(who, "GET", "/traces")).json()["traces"]
        listed[who] = {each["trace_id"] for each in traces} & {trace_id(1), trace_id(2)}
    assert listed == {
        "ann": {trace_id(1)},
        "ada": {trace_id(1)},
        "bob": set(),
        "ops": {trace_id(1), trace_id(2)},
    }
    for key in ("mine", trace_id(1)):
        assert (await rig.ask("ada", "GET", f"/traces/{key}")).status_code == 200
        assert (await rig.ask("bob", "GET", f"/traces/{key}")).status_code == 404
    assert (await rig.ask("ada", "GET", f"/traces/{trace_id(2)}")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/mesh"),
        ("GET", "/server_info"),
        ("GET", "/is_sleeping"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("POST", "/start_profile"),
        ("POST", "/stop_profile"),
        ("POST", "/mesh/absent/drain"),
        ("GET", "/v1/usage/tenants"),
    ],
)
async def test_routes_about_all_tenants_are_for_admins(rig: Rig, method: str, path: str) -> None:
    refused = await rig.ask("ann", method, path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    if method == "GET":
        assert (await rig.ask("ops", method, path)).status_code == 200


async def test_prefix_caches_are_separate_if_configured(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    path.write_text(key_file(mark))
    limits: dict[str, Any] = {"keys_file": path, "separate_prefix_caches": True}
    async with BackEnd(bus_settings, redis_settings, **limits) as mesh:
        rig = Rig(mesh, mark)
        for who, more in (("ann", {}), ("ada", {}), ("bob", {}), ("bob", {"cache_salt": "s"})):
            body = {"model": mesh.model, "prompt": "Hi", **more}
            answer = await rig.ask(who, "POST", "/v1/completions", json=body)
            assert answer.status_code == 200
        salts = [each.cache_salt for each in mesh.tokenizer.received]
    acme, bolt = (f"{rig.tenant(who)}:" for who in ("ann", "bob"))
    assert salts == [acme, acme, bolt, f"{bolt}s"]


async def test_a_tenant_that_stores_much_displaces_no_other(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    mark = secrets.token_hex(4)
    path = tmp_path / "keys.toml"
    path.write_text(key_file(mark))
    responses = {"max_total_bytes": 2**20}
    async with BackEnd(bus_settings, redis_settings, keys_file=path, responses=responses) as mesh:
        rig, served = Rig(mesh, mark), mesh.work(Responses)
        assert served.reader is not None
        shares = served.reader.logs.shares
        conversation = (await rig.ask("ann", "POST", "/v1/conversations", json={})).json()["id"]
        response = (await rig.respond("ann")).json()["id"]
        # A response's log has its instructions at least twice.
        large = {"instructions": "x" * 30_000, "truncation": "auto"}
        others = []
        for _ in range(30):
            others.append((await rig.respond("bob", **large)).json()["id"])
            await mesh.until(lambda: not served._runs._tasks and not shares._victims)
        assert (await rig.ask("bob", "GET", f"/v1/responses/{others[0]}")).status_code == 404
        for who, kept in (
            ("ann", f"/v1/conversations/{conversation}"),
            ("ann", f"/v1/responses/{response}"),
            ("bob", f"/v1/responses/{others[-1]}"),
        ):
            assert (await rig.ask(who, "GET", kept)).status_code == 200
