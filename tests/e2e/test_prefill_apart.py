"""Prompts that one worker computes and another one decodes, in a mesh as users start it."""

import asyncio
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.mesh_process import MeshProcess, mesh
from tokenmesh.cli.embedded.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(150)]

ROLE = "TOKENMESH_WORKER__KV__ROLE"
MODEL = "tokenmesh-demo"
TOKENS = 48


def body(number: int, words: int = 500, **fields: Any) -> dict[str, Any]:
    text = " ".join(f"word{(number * 7 + place) % 97}" for place in range(words))
    return {
        "model": MODEL,
        "prompt": text,
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        **fields,
    }


async def complete(client: httpx.AsyncClient, number: int, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=body(number, **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda each: each["index"])]


def worker(process: MeshProcess, role: str) -> psutil.Process:
    """The one with this role that is not about to be replaced."""
    for child in process.process.children():
        if child.status() != psutil.STATUS_ZOMBIE and child.environ().get(ROLE) == role:
            return child
    raise LookupError(role)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum over all series."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(each.rsplit(" ", 1)[1]) for each in lines if each.startswith(name))


async def test_streams_are_those_of_a_mesh_without_prefill_workers_whoever_dies(
    demo_mesh: MeshProcess,
) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"logprobs": 2},
        {"temperature": 0.0},
        {"words": 3},
        {},
    ]
    async with httpx.AsyncClient(base_url=demo_mesh.url, timeout=60) as client:
        expected = [await complete(client, at, **case) for at, case in enumerate(cases)]
    with mesh(free_port(), "--workers", "1", "--prefill-workers", "1") as apart:
        apart.wait_workers(2)
        async with httpx.AsyncClient(base_url=apart.url, timeout=60) as client:
            got = [await complete(client, at, **case) for at, case in enumerate(cases)]
            assert [texts(each) for each in got] == [texts(each) for each in expected]
            # what another worker computes for a request is not cached for it
            assert [each["usage"] for each in got] == [each["usage"] for each in expected]
            assert await metric(client, "tokenmesh:kv_transfer_bytes_total") > 0
            assert await metric(client, "tokenmesh:kv_load_failures_total") == 0
            for role in ("prefill", "decode"):
                later = [asyncio.create_task(complete(client, at, **case))
                         for at, case in enumerate(cases, 100)]  # fmt: skip
                await asyncio.sleep(0.05)
                worker(apart, role).kill()
                after = await asyncio.gather(*later)
                async with httpx.AsyncClient(base_url=demo_mesh.url, timeout=60) as other:
                    right = [
                        await complete(other, at, **case) for at, case in enumerate(cases, 100)
                    ]
                assert [texts(each) for each in after] == [texts(each) for each in right]
                apart.wait_workers(2)
