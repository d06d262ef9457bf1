"""A response survives its gateway: another one continues it, event by event."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway_process import GatewayProcess, gateway_process
from tests.fakes.response_client import (
    Event,
    ResponseClient,
    numbers,
    output_text,
    read_events,
    text_of,
)
from tests.fakes.small_mesh import SmallMesh
from tests.servers import Server, bus_settings_of, redis_settings_of
from tokenmesh.services.gateway.apis.responses.records import Adopted
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.shared.ids import ResponseId

pytestmark = pytest.mark.timeout(90)
"""Gateways start as processes, which is slow on a busy machine."""

REQUEST: dict[str, Any] = {
    "input": "Tell me a story.",
    "seed": 7,
    "temperature": 1.0,
    "ignore_eos": True,
    "max_output_tokens": 120,
}


@pytest.fixture
def nats(start_nats: Callable[[], Server]) -> Server:
    return start_nats()


@pytest.fixture
def redis(start_redis: Callable[[], Server]) -> Server:
    return start_redis()


@pytest.fixture
async def mesh(tmp_path: Path, nats: Server, redis: Server) -> AsyncIterator[SmallMesh]:
    small = SmallMesh(
        tmp_path,
        bus_settings_of(nats),
        redis_settings_of(redis),
        worker={"sim_step_s": 0.01},
        service={"beat_interval_s": 0.25, "missed_beats": 4},
        responses={"adopt_interval_s": 0.1, "poll_s": 0.2, "cancel_wait_s": 0.5},
    )
    async with small:
        yield small


@pytest.fixture
async def owner(mesh: SmallMesh, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    """A client of the gateway that dies."""
    async with gateway_process(tmp_path, mesh.settings, mesh.model) as process:
        yield process


@pytest.fixture
def adopter(mesh: SmallMesh) -> ResponseClient:
    """A client of the gateway in this process."""
    return ResponseClient(mesh.client, mesh.model)


def kinds_of(events: list[Event]) -> list[str]:
    """Joins adjacent deltas: how text is cut into deltas depends on timing."""
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    return [kind for kind in kinds if kind != "response.queued"]


def counts_of(last: Event) -> tuple[int, int, int, int]:
    """The usage without cached tokens: a repeated request has more prefix hits."""
    usage = last["response"]["usage"]
    reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    return usage["input_tokens"], usage["output_tokens"], reasoning, usage["total_tokens"]


async def check_whole(adopter: ResponseClient, events: list[Event]) -> None:
    """No event is missing or repeated, and all equal those of an uninterrupted run."""
    assert numbers(events) == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.incomplete", last
    uninterrupted = await adopter.stream(**REQUEST)
    assert counts_of(last) == counts_of(uninterrupted[-1])
    assert text_of(events) == text_of(uninterrupted)
    assert output_text(last["response"]) == text_of(events)
    assert await adopter.events(last["response"]["id"]) == events
    assert kinds_of(events) == kinds_of(uninterrupted)


@pytest.mark.parametrize("limit", [1, pytest.param(9, marks=pytest.mark.slow), 60])
async def test_a_background_response_outlives_its_gateway(
    owner: GatewayProcess, adopter: ResponseClient, limit: int
) -> None:
    seen = await owner.client.stream(limit=limit, background=True, **REQUEST)
    await owner.kill()
    rest = await adopter.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    await check_whole(adopter, seen + rest)


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.slow), 60])
async def test_usage_equals_that_of_an_uninterrupted_run(
    owner: GatewayProcess, adopter: ResponseClient, limit: int
) -> None:
    """Cached tokens too: prefix hits on the dead gateway's work are not reported."""
    request = {**REQUEST, "input": "Tell me a story of a long journey. " * 3}
    cold = (await adopter.create(**{**request, "max_output_tokens": 1}))["usage"]
    uninterrupted = (await adopter.create(**request))["usage"]
    cached = uninterrupted["input_tokens_details"]["cached_tokens"]
    assert cold["input_tokens_details"]["cached_tokens"] == 0 < cached
    seen = await owner.client.stream(limit=limit, background=True, **request)
    await owner.kill()
    rest = await adopter.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    assert rest[-1]["response"]["usage"] == uninterrupted
    assert (await adopter.get(seen[0]["response"]["id"]))["usage"] == uninterrupted


async def test_a_stream_continues_at_another_gateway_when_its_own_dies(
    owner: GatewayProcess, adopter: ResponseClient
) -> None:
    body = {"model": adopter.model, "stream": True, **REQUEST}
    seen: list[Event] = []
    async with owner.client.http.stream("POST", "/v1/responses", json=body) as response:
        seen = await read_events(response, 40)
        await owner.kill()
    rest = await adopter.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    await check_whole(adopter, seen + rest)


async def test_a_stopping_gateway_leaves_its_responses_to_others(
    owner: GatewayProcess, adopter: ResponseClient
) -> None:
    seen = await owner.client.stream(limit=30, background=True, **REQUEST)
    owner.terminate()
    rest = await adopter.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    assert await owner.wait() == 0
    await check_whole(adopter, seen + rest)


async def test_a_resumed_gateway_cannot_append(
    mesh: SmallMesh, owner: GatewayProcess, adopter: ResponseClient
) -> None:
    seen = await owner.client.stream(limit=20, background=True, **REQUEST)
    queued = seen[0]["response"]
    following = asyncio.create_task(owner.client.events(queued["id"]))
    await mesh.until(lambda: mesh.loads()[0].running == 1)
    owner.stop()
    events = await adopter.events(queued["id"])
    owner.wake()
    # The client of the suspended gateway reads the same events to the end.
    assert await following == events
    await asyncio.sleep(0.5)
    await check_whole(adopter, events)
    assert await owner.client.events(queued["id"]) == events


async def test_a_response_of_a_dead_gateway_is_cancelled(
    owner: GatewayProcess, adopter: ResponseClient
) -> None:
    seen = await owner.client.stream(limit=20, background=True, **REQUEST)
    await owner.kill()
    response_id = seen[0]["response"]["id"]
    answer = await adopter.http.post(f"/v1/responses/{response_id}/cancel")
    assert answer.json()["status"] == "cancelled"
    events = await adopter.events(response_id)
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["status"] == "cancelled"


async def test_a_response_is_cancelled_at_another_gateway(
    owner: GatewayProcess, adopter: ResponseClient
) -> None:
    seen = await owner.client.stream(limit=20, background=True, **REQUEST)
    response_id = seen[0]["response"]["id"]
    answer = await adopter.http.post(f"/v1/responses/{response_id}/cancel")
    assert answer.json()["status"] == "cancelled"
    # Its owner has recorded its progress.
    assert output_text(answer.json())


async def test_a_response_outlives_a_restart_of_nats(nats: Server, adopter: ResponseClient) -> None:
    seen = await adopter.stream(limit=20, background=True, **REQUEST)
    nats.stop()
    await asyncio.sleep(0.3)
    nats.start()
    await check_whole(adopter, await adopter.events(seen[0]["response"]["id"]))


async def test_a_deleted_response_is_not_adopted(
    owner: GatewayProcess, adopter: ResponseClient
) -> None:
    queued = await owner.client.create(background=True, **REQUEST)
    owner.stop()
    assert (await adopter.http.delete(f"/v1/responses/{queued['id']}")).status_code == 200
    owner.wake()
    await asyncio.sleep(0.5)
    await adopter.get(queued["id"], 404)
    assert (await owner.client.http.get("/readyz")).status_code == 200


async def test_responses_do_without_redis(redis: Server, adopter: ResponseClient) -> None:
    first = await adopter.create(**{**REQUEST, "max_output_tokens": 5})
    redis.stop()
    queued = await adopter.create(background=True, previous_response_id=first["id"], **REQUEST)
    events = await adopter.events(queued["id"])
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 120
    assert (await adopter.get(first["id"])) == first


async def test_one_of_two_gateways_adopts_a_response(
    mesh: SmallMesh, adopter: ResponseClient, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        starting = (gateway_process(tmp_path, mesh.settings, mesh.model) for _ in range(2))
        owner, other = await asyncio.gather(*map(stack.enter_async_context, starting))
        requested = [owner.client.create(background=True, **REQUEST) for _ in range(6)]
        ids = [response["id"] for response in await asyncio.gather(*requested)]
        await mesh.until(lambda: mesh.loads()[0].running == len(ids))
        await owner.kill()
        await asyncio.gather(*(check_adopters(adopter, other.client, each) for each in ids))
        await check_owners(mesh, [ResponseId(each) for each in ids])


async def check_adopters(adopter: ResponseClient, other: ResponseClient, response_id: str) -> None:
    events, same = await asyncio.gather(adopter.events(response_id), other.events(response_id))
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 120
    assert same == events


async def check_owners(mesh: SmallMesh, ids: list[ResponseId]) -> None:
    journal = open_journal(mesh.gateway.bus, mesh.settings.responses)
    logs = ResponseLogs(journal, mesh.settings.responses)
    for response_id in ids:
        records = (await logs.read(response_id)).records
        # More than one only if a busy machine delayed heartbeats.
        assert sum(isinstance(record, Adopted) for record in records) >= 1
    async with asyncio.timeout(15):
        while await logs.marks.all():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("leaves", [False, True], ids=["killed", "terminated"])
async def test_an_adopted_response_is_charged_once(
    owner: GatewayProcess, adopter: ResponseClient, leaves: bool
) -> None:
    seen = await owner.client.stream(limit=30, background=True, **REQUEST)
    if leaves:
        owner.terminate()
    else:
        await owner.kill()
    rest = await adopter.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    counted = await counted_once(adopter, rest[-1])
    await owner.wait()
    assert await models_used(adopter) == counted


async def models_used(adopter: ResponseClient) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = (await adopter.http.get("/v1/usage")).json()["models"]
    return models


async def counted_once(adopter: ResponseClient, last: Event) -> list[dict[str, Any]]:
    """Wait until usage is charged; it equals the reported usage."""
    reported = last["response"]["usage"]
    assert reported["output_tokens"] == 120
    async with asyncio.timeout(20):
        while not (counted := await models_used(adopter)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert counted == [
        {
            "model": adopter.model,
            "requests": 1,
            "prompt_tokens": reported["input_tokens"],
            "cached_tokens": reported["input_tokens_details"]["cached_tokens"],
            "completion_tokens": 120,
            **dict.fromkeys(("image_tokens", "audio_tokens", "video_tokens"), 0),
        }
    ]
    return counted


async def test_a_response_deleted_while_running_is_charged(
    adopter: ResponseClient,
) -> None:
    seen = await adopter.stream(limit=40, background=True, **REQUEST)
    response_id = seen[0]["response"]["id"]
    assert (await adopter.http.delete(f"/v1/responses/{response_id}")).status_code == 200
    async with asyncio.timeout(10):
        while not (counted := await models_used(adopter)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert counted[0]["requests"] == 1
    assert 20 < counted[0]["completion_tokens"] < 120


async def test_usage_that_a_dead_gateway_had_not_charged_is_charged(
    mesh: SmallMesh, owner: GatewayProcess, adopter: ResponseClient, redis: Server
) -> None:
    """The gateway ended the response and died while Redis was unavailable."""
    seen = await owner.client.stream(limit=10, background=True, **REQUEST)
    redis.stop()
    response_id = seen[0]["response"]["id"]
    rest = await owner.client.events(response_id, seen[-1]["sequence_number"])
    await owner.kill()
    redis.start()
    counted = await counted_once(adopter, rest[-1])
    logs = ResponseLogs(
        open_journal(mesh.gateway.bus, mesh.settings.responses), mesh.settings.responses
    )
    async with asyncio.timeout(15):
        while await logs.marks.all():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await models_used(adopter) == counted
