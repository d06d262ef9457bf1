"""Upload quotas of a tenant and of all tenants, released when a file is deleted."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tests.servers import Server, redis_settings_of
from tokenmesh.services.gateway.core.tenancy.redis_state import ALL_TENANTS, upload_bytes_key
from tokenmesh.shared.config.mesh import BusSettings

KIB = 1024
TTL_S = 60
TENANTS = ("ann", "bob", "cat")


class Rig:
    """Tenants that may upload 100 KiB each and 150 KiB together, in their own Redis."""

    def __init__(self, mesh: BackEnd, mark: str) -> None:
        self.mesh = mesh
        self._mark = mark

    def client(self, tenant: str) -> httpx.AsyncClient:
        headers = {"x-api-key": self.key(tenant)}
        return httpx.AsyncClient(base_url=self.mesh.url, headers=headers, timeout=10)

    def key(self, tenant: str) -> str:
        return f"sk-{tenant}-{self._mark}"

    async def upload(self, tenant: str, num_bytes: int) -> httpx.Response:
        async with self.client(tenant) as client:
            return await client.post("/v1/files", files={"file": ("a.png", bytes(num_bytes))})

    async def delete(self, tenant: str, file_id: str) -> int:
        async with self.client(tenant) as client:
            return (await client.delete(f"/v1/files/{file_id}")).status_code

    async def counted(self, name: str) -> int:
        tenant = name if name == ALL_TENANTS else f"{name}-{self._mark}"
        found = await self.mesh.redis.call("HGET", upload_bytes_key(tenant), "")
        return int(found) if isinstance(found, bytes) else 0


@pytest.fixture
async def rig(
    bus_settings: BusSettings,
    start_redis: Callable[[], Server],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Rig]:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    lines = [f"[tenants.{name}-{mark}]\nmax_upload_bytes = {100 * KIB}" for name in TENANTS]
    lines += [key_entry(f"sk-{name}-{mark}", f"{name}-{mark}") for name in TENANTS]
    path.write_text("\n".join(lines))
    redis = redis_settings_of(start_redis())
    limits: dict[str, Any] = {"keys_file": path, "upload_bytes_total": 150 * KIB}
    async with BackEnd(
        bus_settings, redis, file_ttl_s=getattr(request, "param", TTL_S), **limits
    ) as mesh:
        yield Rig(mesh, mark)


async def test_a_tenant_over_its_quota_is_refused_until_a_file_is_deleted(rig: Rig) -> None:
    first = await rig.upload("ann", 60 * KIB)
    assert first.status_code == 200
    refused = await rig.upload("ann", 60 * KIB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "upload_quota_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= TTL_S
    assert (await rig.upload("ann", 101 * KIB)).status_code == 413
    file_id = first.json()["id"]
    assert await rig.delete("bob", file_id) == 404
    assert await rig.counted(ALL_TENANTS) == await rig.counted("ann") == 64 * KIB
    assert await rig.delete("ann", file_id) == 200
    assert await rig.counted(ALL_TENANTS) == await rig.counted("ann") == 0
    assert (await rig.upload("ann", 60 * KIB)).status_code == 200


@pytest.mark.parametrize("rig", [1], indirect=True, ids=["1 s"])
async def test_expired_files_are_released(rig: Rig) -> None:
    began_s = time.monotonic()
    assert (await rig.upload("ann", 90 * KIB)).status_code == 200
    while (await rig.upload("ann", 90 * KIB)).status_code != 200:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert time.monotonic() - began_s >= 1


async def test_all_tenants_together_have_a_quota(rig: Rig) -> None:
    assert (await rig.upload("ann", 90 * KIB)).status_code == 200
    refused = await rig.upload("bob", 90 * KIB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert await rig.counted("bob") == 0
    assert (await rig.upload("bob", 40 * KIB)).status_code == 200


@pytest.mark.parametrize("length", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_a_quota_is_enforced_before_the_bytes_are_read(rig: Rig, length: str) -> None:
    await rig.upload("ann", 90 * KIB)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.mesh.url.split(":")[-1]))
    writer.write(
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\nx-api-key: {rig.key('ann')}\r\n{length}\r\n"
        "content-type: multipart/form-data; boundary=b\r\n\r\n".encode()
    )
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    part += bytes(20 * KIB)
    writer.write(b"%x\r\n%b\r\n" % (len(part), part) if "chunked" in length else b"")
    async with asyncio.timeout(15):
        assert (await reader.readline()).split()[1] in (b"413", b"429")
    writer.close()
    assert await rig.counted("ann") == 94 * KIB


async def test_an_upload_that_fails_is_not_counted(rig: Rig) -> None:
    async with rig.client("ann") as client:
        files = {"file": ("a.png", bytes(50 * KIB))}
        wrong = await client.post("/v1/files", files=files, data={"purpose": "none"})
        assert wrong.status_code == 400
        assert (await client.post("/v1/files", files={"file": ("a.png", b"")})).status_code == 400
    assert await rig.counted("ann") == await rig.counted(ALL_TENANTS) == 0


async def test_a_file_that_redis_evicted_is_released_when_it_is_deleted(rig: Rig) -> None:
    file_id = (await rig.upload("ann", 90 * KIB)).json()["id"]
    await rig.mesh.redis.call("DEL", f"tm:blob:tm:file-facts:{file_id}")
    assert await rig.delete("ann", file_id) == 404
    assert await rig.counted("ann") == await rig.counted(ALL_TENANTS) == 0
