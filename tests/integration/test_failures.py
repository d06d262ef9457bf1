"""Failures behind the gateway: the client gets its tokens or a clear error, and soon."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.fakes.back_end import BackEnd, eos_id, saying
from tests.fakes.worker import Script
from tests.servers import Server, bus_settings_of
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.errors import InvalidInput, Overloaded
from tokenmesh.shared.messages import Generate, Refused
from tokenmesh.shared.messages.failed import to_failed
from tokenmesh.shared.tokens import unpack_ids

Servers = tuple[BusSettings, RedisSettings]
NUM_TOKENS = 60


@pytest.fixture
def servers(bus_settings: BusSettings, redis_settings: RedisSettings) -> Servers:
    return bus_settings, redis_settings


def counting(generate: Generate) -> list[int]:
    """Ids that differ by position and by seed: a wrong, lost or doubled one shows."""
    first = 20 + generate.sampling.seed % 7
    return [first + position for position in range(NUM_TOKENS)]


def ask(mesh: BackEnd, **fields: Any) -> dict[str, Any]:
    body = {"model": mesh.model, "prompt": "Count", "max_tokens": NUM_TOKENS, "seed": 1}
    return {**body, "return_token_ids": True, **fields}


def expected(seed: int = 1) -> list[int]:
    return [20 + seed % 7 + position for position in range(NUM_TOKENS)]


async def ids_of_stream(mesh: BackEnd, **fields: Any) -> dict[int, list[int]]:
    """Token ids by choice, from the chunks of a stream."""
    ids: dict[int, list[int]] = {}
    body = ask(mesh, stream=True, **fields)
    async with (
        httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    ids.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    return ids


async def post(mesh: BackEnd, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as client:
        return await client.post("/v1/completions", json=ask(mesh, **fields))


async def test_a_lost_message_is_sent_again(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.workers[0].faults.drops = {3, 4, 20}
        assert await ids_of_stream(mesh) == {0: expected()}


async def test_a_lost_last_message_is_requested_again(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, stall_s=0.2) as mesh:
        mesh.workers[0].faults.drops = {NUM_TOKENS}
        assert await ids_of_stream(mesh) == {0: expected()}


async def test_repeated_messages_count_once(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.workers[0].faults.repeats = True
        assert await ids_of_stream(mesh) == {0: expected()}


@pytest.mark.parametrize("fault", ["dies_after", "hangs_after", "breaks_off_after"])
async def test_a_stream_outlives_its_worker(servers: Servers, fault: str) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        second = await mesh.add_worker()
        setattr(mesh.workers[0].faults, fault, 10)
        assert await ids_of_stream(mesh) == {0: expected()}
        taken_over = second.generates[0]
        assert taken_over.attempt == 1
        assert unpack_ids(taken_over.output_ids) == expected()[: len(taken_over.output_ids) // 4]
        assert taken_over.output_ids
        assert mesh.scheduler.received[-1].exclude == [mesh.workers[0].id]


async def test_every_choice_of_a_request_outlives_its_worker(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.dies_after = 10
        ids = await ids_of_stream(mesh, n=4)
        assert ids == {index: expected(1 + index) for index in range(4)}


async def test_the_gap_after_a_killed_worker_is_short(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.dies_after = 10
        loop = asyncio.get_running_loop()
        times = []
        async with (
            httpx.AsyncClient(base_url=mesh.url, timeout=10) as client,
            client.stream("POST", "/v1/completions", json=ask(mesh, stream=True)) as response,
        ):
            times = [loop.time() async for _ in response.aiter_bytes()]
        gap_s = max(after - before for before, after in pairwise(times))
        # The promise is 100 ms on a quiet machine. A starved one may take seconds more.
        assert gap_s < 5.0


async def test_a_worker_that_refuses_is_left_out(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.refuses = True
        assert (await post(mesh)).json()["choices"][0]["token_ids"] == expected()


async def test_a_worker_that_never_answers_is_left_out(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, accept_timeout_s=1.0) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.is_deaf = True
        assert (await post(mesh)).json()["choices"][0]["token_ids"] == expected()


async def test_the_wait_for_a_dead_worker_ends_early(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, accept_timeout_s=30.0) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.is_deaf = True
        async with asyncio.timeout(15):
            assert await ids_of_stream(mesh) == {0: expected()}


async def test_only_workers_that_refuse_are_a_429(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.workers[0].faults.refuses = True
        response = await post(mesh)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "1"


async def test_a_full_mesh_is_a_429_with_retry_after(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.scheduler.is_full = True
        response = await post(mesh)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "3"


async def test_no_scheduler_is_a_503(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, service_wait_s=0.2) as mesh:
        await mesh.stop_scheduler()
        response = await post(mesh)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_responders")


async def test_an_error_before_the_first_token_has_its_status(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.workers[0].faults.fails_with = to_failed(InvalidInput("no such adapter", param="lora"))
        response = await post(mesh, stream=True)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "lora"


async def test_an_error_in_mid_stream_is_an_event_and_then_done(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        worker = mesh.workers[0]
        failing = to_failed(InvalidInput("the tensor is broken"))

        async def fail_later() -> None:
            await mesh.until(lambda: worker.num_messages > 5)
            worker.faults.fails_with = failing

        later = asyncio.create_task(fail_later())
        response = await post(mesh, stream=True)
        await later
        lines = [line for line in response.text.splitlines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == failing.message
        assert lines[-1] == "data: [DONE]"


async def test_a_retryable_failure_migrates_the_stream(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        await mesh.add_worker()
        mesh.workers[0].faults.fails_with = to_failed(Overloaded("out of blocks"))
        assert await ids_of_stream(mesh) == {0: expected()}


async def test_a_request_that_crashes_workers_reaches_only_a_few(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, fruitless_attempts=3) as mesh:
        for _ in range(4):
            await mesh.add_worker()
        for worker in mesh.workers:
            worker.faults.breaks_off_after = 0
        response = await post(mesh)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert sorted(len(worker.generates) for worker in mesh.workers) == [0, 0, 1, 1, 1]


async def test_a_worker_that_fails_all_streams_is_left_out_until_it_works(
    servers: Servers,
) -> None:
    limits: dict[str, Any] = {"breaker_failures": 2.5, "breaker_s": 3.0}
    async with BackEnd(*servers, script=counting, **limits) as mesh:
        await mesh.add_worker()
        bad = mesh.workers[0]
        bad.faults.breaks_off_after = 0
        for _ in range(6):
            assert (await post(mesh)).status_code == 200
        assert len(bad.generates) == 3
        assert b"workers_left_out 1.0" in mesh.metrics.render()
        bad.faults.breaks_off_after = None
        await asyncio.sleep(3.1)
        for _ in range(4):
            assert (await post(mesh)).status_code == 200
        assert len(bad.generates) == 7
        assert b"workers_left_out 0.0" in mesh.metrics.render()


async def test_the_deadline_ends_a_stream_with_an_error(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, request_timeout_s=0.4) as mesh:
        mesh.workers[0].faults.drops = set(range(1000))
        response = await post(mesh)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"


async def leave(mesh: BackEnd, has_come: Callable[[], bool], **fields: Any) -> None:
    """Send a request and close the connection once `has_come`."""
    body = ask(mesh, **fields)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await mesh.until(has_come)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def never_ending(generate: Generate) -> list[int]:
    return [20] * generate.sampling.max_tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_streams(servers: Servers, stream: bool) -> None:
    async with BackEnd(*servers, script=never_ending) as mesh:
        worker = mesh.workers[0]
        worker.step_s = 0.05
        await leave(mesh, lambda: len(worker.runs) == 2, stream=stream, n=2, max_tokens=240)
        await mesh.until(lambda: len(worker.cancels) == 2)
        await mesh.until(lambda: len(mesh.gateway.core.mesh.streams) == 0)


async def test_a_client_that_leaves_while_waiting_for_a_place_starts_nothing(
    servers: Servers,
) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.scheduler.delay_s = 1.0
        await leave(mesh, lambda: bool(mesh.scheduler.received))
        await mesh.until(lambda: b"cancelled_requests_total 1.0" in mesh.metrics.render())
        await asyncio.sleep(1.0)
        assert mesh.workers[0].generates == []


async def test_a_stream_that_outlives_its_cancel_is_cancelled_again(servers: Servers) -> None:
    async with BackEnd(*servers, script=never_ending, stall_s=0.1) as mesh:
        worker = mesh.workers[0]
        worker.ignored_cancels = 1
        worker.step_s = 0.05
        await leave(mesh, lambda: bool(worker.runs), max_tokens=240)
        await mesh.until(lambda: len(worker.cancels) == 2)
        assert all(run.is_over for run in worker.runs.values())


async def test_the_response_of_a_client_that_does_not_read_is_ended(servers: Servers) -> None:
    script: Script = lambda generate: [30] * 200 + [eos_id()]  # noqa: E731
    async with BackEnd(*servers, script=script, max_buffered_tokens=50) as mesh:
        mesh.workers[0].hold()
        request = asyncio.create_task(post(mesh, max_tokens=250))
        await mesh.until(lambda: len(mesh.workers[0].runs) == 1)
        mesh.workers[0].release(burst=100)
        response = await request
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")


async def test_the_mesh_still_serves_after_many_failures(servers: Servers) -> None:
    async with BackEnd(*servers, script=saying("fine")) as mesh:
        mesh.workers[0].faults.fails_with = to_failed(InvalidInput("broken"))
        assert (await post(mesh)).status_code == 400
        mesh.workers[0].faults.fails_with = None
        assert (await post(mesh)).json()["choices"][0]["text"] == "fine"


async def test_a_stream_outlives_a_restart_of_nats(
    start_nats: Callable[[], Server], redis_settings: RedisSettings
) -> None:
    server = start_nats()
    mesh = BackEnd(bus_settings_of(server), redis_settings, script=counting, stall_s=0.3)
    mesh.step_s = 0.01
    async with mesh:
        await mesh.add_worker()
        reading = asyncio.create_task(ids_of_stream(mesh))
        await mesh.until(lambda: mesh.workers[0].num_messages > 10)
        server.stop()
        await asyncio.sleep(0.2)
        server.start()
        assert await reading == {0: expected()}
        assert await ids_of_stream(mesh, seed=2) == {0: expected(2)}


async def test_an_old_restart_of_nats_does_not_delay_finding_a_dead_worker(
    start_nats: Callable[[], Server], redis_settings: RedisSettings
) -> None:
    server = start_nats()
    limits: dict[str, Any] = {"bus_grace_s": 60.0}
    mesh = BackEnd(bus_settings_of(server), redis_settings, script=counting, **limits)
    async with mesh:
        await mesh.add_worker()
        server.stop()
        server.start()
        recovery = mesh.gateway.core.mesh.recovery
        await mesh.until(lambda: recovery._grace_until_s > 0)
        recovery._grace_until_s -= limits["bus_grace_s"]
        mesh.workers[0].faults.dies_after = 10
        async with asyncio.timeout(15):
            assert await ids_of_stream(mesh) == {0: expected()}


async def test_one_prompt_that_is_too_long_fails_the_request_and_stops_the_others(
    servers: Servers,
) -> None:
    async with BackEnd(*servers, script=never_ending) as mesh:
        response = await post(mesh, prompt=[[20], [20] * 300, [21]], max_tokens=200)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert len(mesh.gateway.core.mesh.streams) == 0
        started = len(mesh.workers[0].generates)
        await mesh.until(lambda: len(mesh.workers[0].cancels) == started)


async def test_a_tokenizer_that_starts_late_gets_a_retry(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting, retry_pause_s=0.2) as mesh:
        await mesh.stop_tokenizer()
        asked = asyncio.create_task(post(mesh))
        await asyncio.sleep(0.1)
        await mesh.start_tokenizer()
        assert (await asked).status_code == 200


async def test_a_refusal_of_a_scheduler_keeps_its_text(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.scheduler.refusal = Refused(reason="tenant over its budget", retry_after_s=7.0)
        response = await post(mesh)
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert "budget" in response.json()["error"]["message"]


async def test_a_stream_that_lost_only_its_end_is_complete(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        second = await mesh.add_worker()
        mesh.workers[0].faults.hides_end = True
        asked = asyncio.create_task(post(mesh))
        await mesh.until(lambda: mesh.workers[0].num_messages >= NUM_TOKENS)
        await asyncio.sleep(0.05)
        await mesh.workers[0].die()
        choice = (await asked).json()["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == (expected(), "length")
        assert second.generates == []


async def test_the_last_worker_is_tried_again_when_there_is_no_other(servers: Servers) -> None:
    async with BackEnd(*servers, script=counting) as mesh:
        mesh.workers[0].faults.breaks_off_after = 10
        asked = asyncio.create_task(post(mesh))
        await mesh.until(lambda: len(mesh.workers[0].generates) > 1)
        mesh.workers[0].faults.breaks_off_after = None
        assert (await asked).json()["choices"][0]["token_ids"] == expected()


async def test_a_stream_without_any_worker_left_ends_with_an_error(servers: Servers) -> None:
    limits: dict[str, Any] = {"stream_attempts": 3, "call_attempts": 1, "retry_pause_s": 0.01}
    async with BackEnd(*servers, script=counting, **limits) as mesh:
        mesh.workers[0].faults.dies_after = 10
        response = await post(mesh, stream=True)
        lines = [line for line in response.text.splitlines() if line]
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        # A ping may end the last attempt before NATS answers that there is no subscriber.
        assert error["code"] in {"no_responders", "unavailable"}
        assert lines[-1] == "data: [DONE]"
