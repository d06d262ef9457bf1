"""A response outlives the gateway that made it: another one goes on, event by event."""

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
from tokenmesh.services.gateway.responses.journal import open_journal
from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.services.gateway.responses.records import Adopted
from tokenmesh.shared.ids import ResponseId

pytestmark = pytest.mark.timeout(90)
"""Gateways start as processes, which takes a busy machine its time."""

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
    """The gateway that will die."""
    async with gateway_process(tmp_path, mesh.settings, mesh.model) as process:
        yield process


@pytest.fixture
def heir(mesh: SmallMesh) -> ResponseClient:
    """Of the gateway in this process."""
    return ResponseClient(mesh.client, mesh.model)


def kinds_of(events: list[Event]) -> list[str]:
    """Neighbours of a kind are one: how text is cut into deltas is a matter of time."""
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    return [kind for kind in kinds if kind != "response.queued"]


def counts_of(last: Event) -> tuple[int, int, int, int]:
    """Of the usage, all but what was cached: the later of two equal requests finds more."""
    usage = last["response"]["usage"]
    reasoning = usage["output_tokens_details"]["reasoning_tokens"]
    return usage["input_tokens"], usage["output_tokens"], reasoning, usage["total_tokens"]


async def check_whole(heir: ResponseClient, events: list[Event]) -> None:
    """Nothing is missing, nothing is there twice, all is what an undisturbed run makes."""
    assert numbers(events) == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.incomplete", last
    undisturbed = await heir.stream(**REQUEST)
    assert counts_of(last) == counts_of(undisturbed[-1])
    assert text_of(events) == text_of(undisturbed)
    assert output_text(last["response"]) == text_of(events)
    assert await heir.events(last["response"]["id"]) == events
    assert kinds_of(events) == kinds_of(undisturbed)


@pytest.mark.parametrize("limit", [1, 9, 60])
async def test_a_background_response_outlives_its_gateway(
    owner: GatewayProcess, heir: ResponseClient, limit: int
) -> None:
    seen = await owner.client.stream(limit=limit, background=True, **REQUEST)
    await owner.kill()
    rest = await heir.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    await check_whole(heir, seen + rest)


@pytest.mark.parametrize("limit", [1, 60])
async def test_usage_is_that_of_an_undisturbed_run(
    owner: GatewayProcess, heir: ResponseClient, limit: int
) -> None:
    """The cached tokens too: what an heir finds of its predecessor's work is not the client's."""
    request = {**REQUEST, "input": "Tell me a story of a long journey. " * 3}
    cold = (await heir.create(**{**request, "max_output_tokens": 1}))["usage"]
    undisturbed = (await heir.create(**request))["usage"]
    cached = undisturbed["input_tokens_details"]["cached_tokens"]
    assert cold["input_tokens_details"]["cached_tokens"] == 0 < cached
    seen = await owner.client.stream(limit=limit, background=True, **request)
    await owner.kill()
    rest = await heir.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    assert rest[-1]["response"]["usage"] == undisturbed
    assert (await heir.get(seen[0]["response"]["id"]))["usage"] == undisturbed


async def test_a_stream_goes_on_elsewhere_when_its_gateway_dies(
    owner: GatewayProcess, heir: ResponseClient
) -> None:
    body = {"model": heir.model, "stream": True, **REQUEST}
    seen: list[Event] = []
    async with owner.client.http.stream("POST", "/v1/responses", json=body) as response:
        seen = await read_events(response, 40)
        await owner.kill()
    rest = await heir.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    await check_whole(heir, seen + rest)


async def test_a_gateway_that_leaves_hands_its_responses_over(
    owner: GatewayProcess, heir: ResponseClient
) -> None:
    seen = await owner.client.stream(limit=30, background=True, **REQUEST)
    owner.terminate()
    rest = await heir.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    assert await owner.wait() == 0
    await check_whole(heir, seen + rest)


async def test_a_gateway_that_wakes_up_writes_nothing_more(
    owner: GatewayProcess, heir: ResponseClient
) -> None:
    queued = await owner.client.create(background=True, **REQUEST)
    following = asyncio.create_task(owner.client.events(queued["id"]))
    await asyncio.sleep(0.4)
    owner.stop()
    events = await heir.events(queued["id"])
    owner.wake()
    # Who had asked the sleeper reads the same to the end.
    assert await following == events
    await asyncio.sleep(0.5)
    await check_whole(heir, events)
    assert await owner.client.events(queued["id"]) == events


async def test_a_response_is_cancelled_although_its_gateway_is_gone(
    owner: GatewayProcess, heir: ResponseClient
) -> None:
    seen = await owner.client.stream(limit=20, background=True, **REQUEST)
    await owner.kill()
    response_id = seen[0]["response"]["id"]
    answer = await heir.http.post(f"/v1/responses/{response_id}/cancel")
    assert answer.json()["status"] == "cancelled"
    events = await heir.events(response_id)
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["status"] == "cancelled"


async def test_a_response_is_cancelled_at_another_gateway(
    owner: GatewayProcess, heir: ResponseClient
) -> None:
    queued = await owner.client.create(background=True, **REQUEST)
    await asyncio.sleep(0.3)
    answer = await heir.http.post(f"/v1/responses/{queued['id']}/cancel")
    assert answer.json()["status"] == "cancelled"
    # Its owner knew how far it was.
    assert output_text(answer.json())


async def test_a_response_outlives_a_restart_of_nats(nats: Server, heir: ResponseClient) -> None:
    queued = await heir.create(background=True, **REQUEST)
    await asyncio.sleep(0.4)
    nats.stop()
    await asyncio.sleep(0.3)
    nats.start()
    await check_whole(heir, await heir.events(queued["id"]))


async def test_a_deleted_response_is_not_adopted(
    owner: GatewayProcess, heir: ResponseClient
) -> None:
    queued = await owner.client.create(background=True, **REQUEST)
    owner.stop()
    assert (await heir.http.delete(f"/v1/responses/{queued['id']}")).status_code == 200
    owner.wake()
    await asyncio.sleep(0.5)
    await heir.get(queued["id"], 404)
    assert (await owner.client.http.get("/readyz")).status_code == 200


async def test_responses_do_without_redis(redis: Server, heir: ResponseClient) -> None:
    first = await heir.create(**{**REQUEST, "max_output_tokens": 5})
    redis.stop()
    queued = await heir.create(background=True, previous_response_id=first["id"], **REQUEST)
    events = await heir.events(queued["id"])
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 120
    assert (await heir.get(first["id"])) == first


async def test_of_two_heirs_one_goes_on(
    mesh: SmallMesh, heir: ResponseClient, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        starting = (gateway_process(tmp_path, mesh.settings, mesh.model) for _ in range(2))
        owner, other = await asyncio.gather(*map(stack.enter_async_context, starting))
        asked = [owner.client.create(background=True, **REQUEST) for _ in range(6)]
        ids = [response["id"] for response in await asyncio.gather(*asked)]
        await asyncio.sleep(0.4)
        await owner.kill()
        await asyncio.gather(*(check_heirs(heir, other.client, each) for each in ids))
        await check_owners(mesh, [ResponseId(each) for each in ids])


async def check_heirs(heir: ResponseClient, other: ResponseClient, response_id: str) -> None:
    events, same = await asyncio.gather(heir.events(response_id), other.events(response_id))
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] == 120
    assert same == events


async def check_owners(mesh: SmallMesh, ids: list[ResponseId]) -> None:
    journal = open_journal(mesh.gateway.bus, mesh.settings.responses)
    logs = ResponseLogs(journal, mesh.settings.responses)
    for response_id in ids:
        records = (await logs.read(response_id)).records
        # More than one only where a busy machine kept an heir from beating.
        assert sum(isinstance(record, Adopted) for record in records) >= 1
    async with asyncio.timeout(15):
        while await logs.marks():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("leaves", [False, True], ids=["killed", "terminated"])
async def test_what_one_gateway_began_and_another_ended_is_charged_once(
    owner: GatewayProcess, heir: ResponseClient, leaves: bool
) -> None:
    seen = await owner.client.stream(limit=30, background=True, **REQUEST)
    if leaves:
        owner.terminate()
    else:
        await owner.kill()
    rest = await heir.events(seen[0]["response"]["id"], seen[-1]["sequence_number"])
    counted = await counted_once(heir, rest[-1])
    await owner.wait()
    assert await models_used(heir) == counted


async def models_used(heir: ResponseClient) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = (await heir.http.get("/v1/usage")).json()["models"]
    return models


async def counted_once(heir: ResponseClient, last: Event) -> list[dict[str, Any]]:
    """Wait until something is charged: it is told before. Then it is what was told."""
    told = last["response"]["usage"]
    assert told["output_tokens"] == 120
    async with asyncio.timeout(20):
        while not (counted := await models_used(heir)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert counted == [
        {
            "model": heir.model,
            "requests": 1,
            "prompt_tokens": told["input_tokens"],
            "cached_tokens": told["input_tokens_details"]["cached_tokens"],
            "completion_tokens": 120,
        }
    ]
    return counted


async def test_a_response_that_is_deleted_in_the_middle_is_charged_all_the_same(
    heir: ResponseClient,
) -> None:
    seen = await heir.stream(limit=40, background=True, **REQUEST)
    response_id = seen[0]["response"]["id"]
    assert (await heir.http.delete(f"/v1/responses/{response_id}")).status_code == 200
    async with asyncio.timeout(10):
        while not (counted := await models_used(heir)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert counted[0]["requests"] == 1
    assert 20 < counted[0]["completion_tokens"] < 120


async def test_usage_that_a_gateway_took_along_is_counted_by_another(
    mesh: SmallMesh, owner: GatewayProcess, heir: ResponseClient, redis: Server
) -> None:
    """It ended the response and died before Redis, which was away, could be told."""
    seen = await owner.client.stream(limit=10, background=True, **REQUEST)
    redis.stop()
    response_id = seen[0]["response"]["id"]
    rest = await owner.client.events(response_id, seen[-1]["sequence_number"])
    await owner.kill()
    redis.start()
    counted = await counted_once(heir, rest[-1])
    logs = ResponseLogs(
        open_journal(mesh.gateway.bus, mesh.settings.responses), mesh.settings.responses
    )
    async with asyncio.timeout(15):
        while await logs.marks():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await models_used(heir) == counted
