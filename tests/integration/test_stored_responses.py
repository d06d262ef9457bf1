"""Stored responses on one gateway: read, streamed, cancelled, deleted, chained."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.response_client import (
    ResponseClient,
    numbers,
    output_text,
    read_events,
    text_of,
)
from tests.servers import Server, bus_settings_of
from tokenmesh.services.gateway.app import open_journals
from tokenmesh.services.gateway.main import check_journals
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

TEXT = "Hello from the mesh, na\u00efve caf\u00e9!"


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[ResponseClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        yield ResponseClient(http, mesh.model)


async def ended(client: ResponseClient, response_id: str) -> dict[str, Any]:
    """The response once it has ended."""
    async with asyncio.timeout(15):
        while True:
            response = await client.get(response_id)
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.02)


async def test_a_stream_is_read_again_from_any_event(client: ResponseClient) -> None:
    events = await client.stream()
    assert text_of(events) == TEXT
    assert numbers(events) == list(range(len(events)))
    response_id = events[0]["response"]["id"]
    assert await client.events(response_id) == events
    for number in (0, 5, len(events) - 2):
        assert await client.events(response_id, number) == events[number + 1 :]
    assert await client.events(response_id, len(events) + 7) == []
    assert await client.get(response_id) == events[-1]["response"]


async def test_a_whole_response_can_be_read_again(client: ResponseClient) -> None:
    response = await client.create()
    assert output_text(response) == TEXT
    assert response["store"] is True
    assert await client.get(response["id"]) == response
    events = await client.events(response["id"])
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["response"] == response


async def test_store_false_stores_nothing(client: ResponseClient) -> None:
    response = await client.create(store=False)
    assert response["store"] is False
    await client.get(response["id"], 404)


async def test_a_background_response_needs_no_client(client: ResponseClient) -> None:
    queued = await client.create(background=True)
    assert (queued["status"], queued["output"]) == ("queued", [])
    response = await ended(client, queued["id"])
    assert output_text(response) == TEXT
    assert response["status"] == "completed"
    events = await client.events(queued["id"])
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert numbers(events) == list(range(len(events)))


async def test_a_background_stream_continues_without_its_client(client: ResponseClient) -> None:
    first = await client.stream(limit=6, background=True)
    response_id = first[0]["response"]["id"]
    rest = await client.events(response_id, first[-1]["sequence_number"])
    assert numbers(first + rest) == list(range(len(first + rest)))
    assert text_of(first + rest) == TEXT


async def test_a_stream_whose_client_leaves_is_cancelled(
    mesh: BackEnd, client: ResponseClient
) -> None:
    mesh.workers[0].step_s = 0.1
    events = await client.stream(limit=6)
    response = await ended(client, events[0]["response"]["id"])
    assert response["status"] == "cancelled"
    assert TEXT.startswith(output_text(response))


async def test_a_background_response_is_cancelled(mesh: BackEnd, client: ResponseClient) -> None:
    mesh.workers[0].step_s = 0.1
    queued = await client.create(background=True)
    await mesh.until(lambda: bool(mesh.workers[0].runs))
    path = f"/v1/responses/{queued['id']}/cancel"
    for _ in range(2):
        answer = await client.http.post(path)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "cancelled"
    await mesh.until(lambda: len(mesh.workers[0].cancels) == 1)


async def test_only_background_responses_are_cancelled(client: ResponseClient) -> None:
    response = await client.create()
    answer = await client.http.post(f"/v1/responses/{response['id']}/cancel")
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]


async def test_a_deleted_response_is_gone(client: ResponseClient) -> None:
    response = await client.create()
    path = f"/v1/responses/{response['id']}"
    assert (await client.http.delete(path)).json()["deleted"] is True
    await client.get(response["id"], 404)
    assert (await client.http.delete(path)).status_code == 404


async def test_deleting_a_running_response_stops_it(mesh: BackEnd, client: ResponseClient) -> None:
    mesh.workers[0].step_s = 0.1
    first = await client.stream(limit=6, background=True)
    response_id = first[0]["response"]["id"]
    path = f"/v1/responses/{response_id}"
    async with client.http.stream("GET", path, params={"stream": "true"}) as following:
        assert (await client.http.delete(path)).status_code == 200
        await mesh.until(lambda: len(mesh.workers[0].cancels) == 1)
        await client.get(response_id, 404)
        last = (await read_events(following, None))[-1]
    assert (last["type"], last["code"]) == ("error", "not_found")
    assert response_id in last["message"]
    assert "deleted" in last["message"]


async def test_a_response_continues_the_previous_one(mesh: BackEnd, client: ResponseClient) -> None:
    first = await client.create(input="One", instructions="Be kind.")
    second = await client.create(input="Two", previous_response_id=first["id"])
    await client.create(input="Three", previous_response_id=second["id"])
    prompt = mesh.tokenizer.received[-1].prompt
    text = prompt.messages_json.decode()  # type: ignore[union-attr]
    places = [text.index(word) for word in ("One", TEXT[:5], "Two", "Three")]
    assert places == sorted(places)
    assert text.count(TEXT[:5]) == 2
    assert "kind" not in text


async def test_a_chain_is_bounded(bus_settings: BusSettings, redis_settings: RedisSettings) -> None:
    limits = {"max_chain": 2}
    async with (
        BackEnd(bus_settings, redis_settings, responses=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        client, previous = ResponseClient(http, mesh.model), None
        for _ in range(3):
            previous = (await client.create(previous_response_id=previous))["id"]
        body = {"model": mesh.model, "input": "x", "previous_response_id": previous}
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 413
        assert answer.json()["error"]["param"] == "previous_response_id"


async def test_input_items_come_in_pages(client: ResponseClient) -> None:
    items = [{"role": "user", "content": f"Message {number}"} for number in range(5)]
    response = await client.create(input=items)
    path = f"/v1/responses/{response['id']}/input_items"

    async def page(**query: Any) -> dict[str, Any]:
        return dict((await client.http.get(path, params=query)).json())

    def texts(found: dict[str, Any]) -> list[str]:
        return [each["content"][0]["text"][-1] for each in found["data"]]

    assert texts(await page()) == list("43210")
    first = await page(limit=2, order="asc")
    assert (texts(first), first["has_more"]) == (list("01"), True)
    second = await page(limit=2, order="asc", after=first["last_id"])
    assert texts(second) == list("23")
    last = await page(limit=2, order="asc", after=second["last_id"])
    assert (texts(last), last["has_more"]) == (["4"], False)
    assert texts(await page(order="asc", before=second["first_id"])) == list("01")


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/responses/resp_absent", 404, "response_id"),
        ("/v1/responses/x.y", 404, "response_id"),
        ("/v1/responses/resp_a%3E?stream=true", 404, "response_id"),
        ("/v1/responses/resp_absent/input_items", 404, "response_id"),
        ("/v1/responses/{id}?stream=true&starting_after=-1", 400, "starting_after"),
        ("/v1/responses/{id}?stream=maybe", 400, "stream"),
        ("/v1/responses/{id}?include=nonsense", 400, "include"),
        ("/v1/responses/{id}/input_items?limit=0", 400, "limit"),
        ("/v1/responses/{id}/input_items?limit=101", 400, "limit"),
        ("/v1/responses/{id}/input_items?order=up", 400, "order"),
        ("/v1/responses/{id}/input_items?after=msg_x", 400, "after"),
    ],
)
async def test_errors_name_the_field(
    client: ResponseClient, path: str, status: int, param: str
) -> None:
    response = await client.create()
    answer = await client.http.get(path.format(id=response["id"]))
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_running_responses_of_a_gateway_are_limited(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    limits = {"max_running": 1}
    async with (
        BackEnd(bus_settings, redis_settings, responses=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        mesh.workers[0].hold()
        await ResponseClient(http, mesh.model).create(background=True)
        body = {"model": mesh.model, "input": "Hi", "background": True}
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        mesh.workers[0].release(1)


async def test_a_request_that_is_too_large_to_be_stored(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    limits = {"max_record_bytes": 64 * 1024}
    async with (
        BackEnd(bus_settings, redis_settings, responses=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        body: dict[str, Any] = {"model": mesh.model, "input": "Hi", "user": "x" * 40_000}
        answer = await http.post("/v1/responses", json={**body, "store": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, "store")
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200
        assert "not stored" in answer.headers["x-tokenmesh-warning"]


async def test_a_mesh_without_jetstream_stores_nothing(
    plain_nats: Server, redis_settings: RedisSettings
) -> None:
    async with (
        BackEnd(bus_settings_of(plain_nats), redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        body = {"model": mesh.model, "input": "Hi"}
        for stream in (False, True):
            answer = await http.post("/v1/responses", json={**body, "stream": stream})
            assert answer.status_code == 200, answer.text
            assert "JetStream" in answer.headers["x-tokenmesh-warning"]
        for wanted in ({"store": True}, {"background": True}):
            answer = await http.post("/v1/responses", json={**body, **wanted})
            assert answer.status_code == 503, answer.text
        assert (await http.get("/v1/responses/resp_1")).status_code == 503


async def test_a_store_smaller_than_its_setting_is_named_with_both_numbers(
    small_nats: Server, redis_settings: RedisSettings, caplog: pytest.LogCaptureFixture
) -> None:
    bus_settings = bus_settings_of(small_nats)
    async with (
        BackEnd(bus_settings, redis_settings) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        await check_journals(open_journals(mesh.bus, mesh.settings))
        for name in ("responses.max_total_bytes", "gateway.upload_bytes_total", "batches.max_tot"):
            assert re.search(rf"[0-9]+ bytes by {name}.* the 8388608 bytes of", caplog.text)
        body = {"model": mesh.model, "input": "Hi"}
        refused = await http.post("/v1/responses", json={**body, "store": True})
        assert refused.status_code == 503, refused.text
        message = refused.json()["error"]["message"]
        assert "536870912 bytes by responses.max_total_bytes" in message
        assert "8388608" in message
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200
        assert "responses.max_total_bytes" in answer.headers["x-tokenmesh-warning"]
    # a store that the settings fit into: nothing is logged
    async with BackEnd(
        bus_settings, redis_settings, responses={"max_total_bytes": 4 << 20}
    ) as mesh:
        caplog.clear()
        journals = open_journals(mesh.bus, mesh.settings)
        await check_journals({"responses": journals["responses"]})
        assert "stored" not in caplog.text


async def test_stored_items_are_referred_to_by_id(mesh: BackEnd, client: ResponseClient) -> None:
    first = await client.create(input="Hi")
    said = first["output"][0]["id"]
    page = await client.http.get(f"/v1/responses/{first['id']}/input_items")
    requested = page.json()["data"][0]["id"]
    for store in (True, False):
        items = [{"id": requested}, {"type": "item_reference", "id": said}]
        more = {"role": "user", "content": "And?"}
        response = await client.create(input=[*items, more], store=store)
        assert response["status"] == "completed"
        prompt: Any = mesh.tokenizer.received[-1].prompt
        reported = [each["role"] for each in json.loads(prompt.messages_json)]
        assert reported == ["user", "assistant", "user"]


@pytest.mark.parametrize("store", [True, False])
async def test_an_unknown_reference_is_refused_by_its_path(
    client: ResponseClient, store: bool
) -> None:
    first = await client.create(input="Hi")
    missing = first["output"][0]["id"][:-1] + "9"
    for item_id in (missing, "msg_none", "msg_" + "0" * 36):
        items = [{"type": "item_reference", "id": item_id}]
        body = {"model": client.model, "input": items, "store": store}
        answer = await client.http.post("/v1/responses", json=body)
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "input[0].id"


async def test_raw_messages_are_sent_on_request(client: ResponseClient) -> None:
    response = await client.create(enable_response_messages=True)
    (requested,), (said,) = response["input_messages"], response["output_messages"]
    assert "Hi" in requested["message"]
    assert said["message"].startswith(TEXT)
    assert len(said["tokens"]) == response["usage"]["output_tokens"]


async def test_the_openai_client_reads_stored_responses(mesh: BackEnd) -> None:
    url = f"{mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="mine", max_retries=0) as client:
        made = await client.responses.create(model=mesh.model, input="Hi", background=True)
        assert made.status == "queued"
        stream = await client.responses.retrieve(made.id, stream=True, starting_after=2)
        events = [event async for event in stream]
        assert events[0].sequence_number == 3
        assert events[-1].type == "response.completed"
        again = await client.responses.retrieve(made.id)
        assert again.output_text == TEXT
        assert again == events[-1].response
        items = [item async for item in client.responses.input_items.list(made.id)]
        assert [item.type for item in items] == ["message"]
        assert (await client.responses.cancel(made.id)).status == "completed"
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_a_client_that_is_too_slow_for_the_feed_reads_the_log(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    limits = {"max_feed_bytes": 1024, "poll_s": 0.1}
    async with (
        BackEnd(bus_settings, redis_settings, responses=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        client = ResponseClient(http, mesh.model)
        events = await client.stream()
        assert numbers(events) == list(range(len(events)))
        assert text_of(events) == TEXT
        assert events[-1]["type"] == "response.completed"
