"""Batches over uploaded files: answers, bad lines, cancellation, expiry, and a dead gateway."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.key_file import key_entry
from tokenmesh.services.gateway.apis.batches.logs import BatchLogs, log_key
from tokenmesh.services.gateway.apis.batches.service import BatchRunner
from tokenmesh.shared.bus.jetstream import JetStreamJournal
from tokenmesh.shared.config.batches import BatchSettings
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import GatewayId

CHAT = "/v1/chat/completions"
SERVICE = {"beat_interval_s": 0.05}


def line(custom_id: str, model: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "max_tokens": 8, **fields}
    if url == CHAT:
        body.setdefault("messages", [{"role": "user", "content": custom_id}])
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"\n".join(
        each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines
    )


HOSTILE = (
    b"x" * 3000,
    b'{"custom_id":"g","body":{"model":"\xff"},"method":"POST","url":"%s"}' % CHAT.encode(),
    b'{"custom_id":"h","body":' + b"[" * 1500,
)


class Rig:
    def __init__(self, mesh: BackEnd, client: openai.AsyncOpenAI) -> None:
        self.mesh = mesh
        self.client = client

    async def create(self, data: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
        file = await self.client.files.create(file=("in.jsonl", data), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
        )

    async def ended(self, batch_id: str, seconds: float = 15.0) -> Any:
        async with asyncio.timeout(seconds):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.02)

    async def answered(self, batch_id: str, number: int) -> None:
        """Return when so many lines have an answer."""
        async with asyncio.timeout(15):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                if batch.request_counts and batch.request_counts.completed >= number:
                    return
                await asyncio.sleep(0.02)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = (await self.client.files.content(file_id)).text
        return [json.loads(each) for each in text.splitlines()]


@pytest.fixture
async def start(
    bus_settings: BusSettings, redis_settings: RedisSettings
) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start_rig(key: str = "x", keys_file: Path | None = None, **batches: Any) -> Rig:
            mesh = BackEnd(bus_settings, redis_settings, service=SERVICE, keys_file=keys_file)
            mesh.settings = changed(
                mesh.settings, {"batches": {"look_interval_s": 0.02, **batches}}
            )
            await stack.enter_async_context(mesh)
            # Others of this NATS would be continued here.
            await mesh.work(BatchRunner).service.logs.journal.purge("tm.batch.>")
            client = openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key=key, max_retries=0)
            return Rig(mesh, await stack.enter_async_context(client))

        yield start_rig


async def test_every_line_has_one_answer_or_one_error(start: Callable[..., Any]) -> None:
    rig = await start(max_line_bytes=2048)
    model = rig.mesh.model
    data = jsonl(
        line("a", model),
        b"not json",
        b"",
        line("b", model, temperature=-1.0),
        line("a", model),
        line("c", model, stream=True),
        line("d", model, url="/v1/completions"),
        line("e", "unknown"),
        line("f", model),
        *HOSTILE,
    )
    made = await rig.create(data, metadata={"night": "1"})
    assert (made.object, made.status, made.endpoint) == ("batch", "validating", CHAT)
    batch = await rig.ended(made.id)
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (11, 2, 9)
    output = await rig.lines(batch.output_file_id)
    assert {each["custom_id"] for each in output} == {"a", "f"}
    for each in output:
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        message = each["response"]["body"]["choices"][0]["message"]
        assert message["content"].startswith("Hello")
    errors = await rig.lines(batch.error_file_id)
    codes = Counter(each["error"]["code"] for each in errors if each["error"])
    assert codes.pop("invalid_json_line") == 2
    once = ("duplicate_custom_id", "line_too_long", "mismatched_endpoint", "not_supported")
    assert codes == dict.fromkeys(once, 1)
    refused = {each["custom_id"]: each["response"] for each in errors if each["response"]}
    statuses = {name: each["status_code"] for name, each in refused.items()}
    assert statuses == {"b": 400, "e": 404, "g": 400}
    assert refused["b"]["body"]["error"]["param"] == "temperature"
    assert batch.usage.output_tokens == sum(
        each["response"]["body"]["usage"]["completion_tokens"] for each in output
    )
    assert batch.metadata == {"night": "1"}
    assert {each.tenant_priority for each in rig.mesh.scheduler.received} == {1000}
    listed = [each.id async for each in rig.client.batches.list(limit=1)]
    assert made.id in listed
    with pytest.raises(openai.ConflictError):
        await rig.client.batches.cancel(made.id)


async def test_a_file_without_requests_fails_the_batch(start: Callable[..., Any]) -> None:
    rig = await start()
    for data, code in ((b"{}\n", "invalid_json_line"), (b"\n \n", "empty_file")):
        batch = await rig.ended((await rig.create(data)).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", code)
    image = await rig.client.files.create(file=("a", b"x"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await rig.client.batches.create(
            input_file_id=image.id, endpoint=CHAT, completion_window="24h"
        )


async def test_a_cancelled_batch_keeps_its_answers(start: Callable[..., Any]) -> None:
    rig = await start(max_requests_running=2)
    rig.mesh.workers[0].step_s = 0.05
    made = await rig.create(jsonl(*(line(f"r{n}", rig.mesh.model) for n in range(200))))
    await rig.answered(made.id, 2)
    cancelled = await rig.client.batches.cancel(made.id)
    assert cancelled.status in ("cancelling", "cancelled")
    batch = await rig.ended(made.id)
    assert batch.status == "cancelled"
    output = await rig.lines(batch.output_file_id)
    assert 2 <= len(output) == batch.request_counts.completed < 200


async def test_an_expired_batch_names_what_was_not_run(start: Callable[..., Any]) -> None:
    rig = await start(max_requests_running=2, completion_window_s=1.0)
    rig.mesh.workers[0].step_s = 0.05
    batch = await rig.ended(
        (await rig.create(jsonl(*(line(f"r{n}", rig.mesh.model) for n in range(40))))).id
    )
    assert batch.status == "expired"
    output, errors = await rig.lines(batch.output_file_id), await rig.lines(batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    names = [each["custom_id"] for each in (*output, *errors)]
    assert sorted(names) == sorted(f"r{n}" for n in range(40))


async def test_another_gateway_continues_the_batch_of_a_dead_one(start: Callable[..., Any]) -> None:
    rig = await start(max_requests_running=4)
    mesh = rig.mesh
    mesh.workers[0].step_s = 0.02
    made = await rig.create(jsonl(*(line(f"r{n}", mesh.model) for n in range(40))))
    await rig.answered(made.id, 4)
    # Its tasks die without a word, and nothing renews its heartbeat: it never sent one here.
    dead = mesh.work(BatchRunner)
    await dead.stop()
    logs: BatchLogs = dead.service.logs
    heir = BatchRunner(dead.service, mesh.gateway.core)
    dead.service.owner = GatewayId("gateway-heir")
    before = await logs.answered(made.id)
    assert 4 <= len(before) < 40
    running = asyncio.create_task(heir.run())
    try:
        batch = await rig.ended(made.id)
        await mesh.until(lambda: not heir.num_running)
    finally:
        await heir.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert (batch.status, batch.request_counts.completed) == ("completed", 40)
    output = await rig.lines(batch.output_file_id)
    assert sorted(each["custom_id"] for each in output) == sorted(f"r{n}" for n in range(40))
    used = [each["response"]["body"]["usage"]["completion_tokens"] for each in output]
    assert batch.usage.output_tokens == sum(used) > 0
    assert "batches_adopted_total 1.0" in mesh.metrics.render().decode()
    # What an ended batch needs no longer is deleted.
    assert len(await logs.journal.read(log_key(made.id), 0, 10)) == 1
    assert logs.marks is not None
    assert made.id not in [name for _, name in await logs.marks.all()]


async def test_other_endpoints_and_limits(start: Callable[..., Any]) -> None:
    rig = await start(max_open_per_tenant=1)
    model = rig.mesh.model
    data = jsonl(line("p", model, url="/v1/completions", prompt="Hi"))
    batch = await rig.ended((await rig.create(data, "/v1/completions")).id)
    output = await rig.lines(batch.output_file_id)
    assert output[0]["response"]["body"]["object"] == "text_completion"
    data = jsonl(line("r", model, url="/v1/responses", input="Hi", store=False))
    data = data.replace(b'"max_tokens": 8, ', b"")
    batch = await rig.ended((await rig.create(data, "/v1/responses")).id)
    output = await rig.lines(batch.output_file_id)
    assert output[0]["response"]["body"]["object"] == "response", batch
    rig.mesh.workers[0].step_s = 0.2
    await rig.create(jsonl(line("slow", model)))
    with pytest.raises(openai.RateLimitError):
        await rig.create(jsonl(line("late", model)))


async def test_of_many_batches_at_once_only_those_within_the_limit_begin(
    start: Callable[..., Any],
) -> None:
    rig = await start(max_open_per_tenant=3, max_requests_running=1)
    rig.mesh.workers[0].step_s = 0.2
    data = jsonl(*(line(f"r{n}", rig.mesh.model) for n in range(50)))
    made = await asyncio.gather(*(rig.create(data) for _ in range(10)), return_exceptions=True)
    refused = [each for each in made if isinstance(each, openai.RateLimitError)]
    assert (len(made), len(refused)) == (10, 7)
    assert "has 3 batches that have not ended" in str(refused[0])


async def test_lines_wait_for_the_limits_of_their_tenant(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    mark, path = secrets.token_hex(4), tmp_path / "keys.toml"
    # The upload and the batch are requests, too.
    limit = f"[tenants.shop-{mark}]\nrequests_per_minute = 5\n"
    path.write_text(limit + key_entry(f"sk-{mark}", f"shop-{mark}"))
    rig = await start(key=f"sk-{mark}", keys_file=path)
    made = await rig.create(jsonl(*(line(f"r{n}", rig.mesh.model) for n in range(12))))
    await rig.answered(made.id, 3)
    await rig.client.batches.cancel(made.id)
    counts = (await rig.ended(made.id)).request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 3, 0)


async def test_a_full_disk_ends_batches_with_the_answers_that_they_have(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await start(max_requests_running=2, full_wait_s=0.1)
    rig.mesh.workers[0].step_s = 0.05
    data = jsonl(*(line(f"r{n}", rig.mesh.model) for n in range(200)))
    made = await rig.create(data)
    await rig.answered(made.id, 2)

    async def num_bytes(self: JetStreamJournal) -> int:
        return 1 << 40

    monkeypatch.setattr(JetStreamJournal, "num_bytes", num_bytes)
    batch = await rig.ended(made.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
    output = await rig.lines(batch.output_file_id)
    assert 2 <= len(output) == batch.request_counts.completed < 200
    with pytest.raises(openai.RateLimitError, match="disk for batches is full"):
        await rig.create(data)


async def test_errors_of_a_batch_are_bounded(start: Callable[..., Any]) -> None:
    rig = await start(max_output_bytes=8192, max_requests_running=1)
    made = await rig.create(jsonl(line("good", rig.mesh.model), *[b"bad"] * 200))
    batch = await rig.ended(made.id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", "storage_full")
    assert "errors of the batch" in batch.errors.data[0].message
    errors = await rig.lines(batch.error_file_id)
    assert 0 < len(errors) == batch.request_counts.failed < 200


async def test_a_new_batch_replaces_the_oldest_of_many(start: Callable[..., Any]) -> None:
    rig = await start(max_kept_per_tenant=2)
    data = jsonl(line("a", rig.mesh.model))
    ids = [(await rig.ended((await rig.create(data)).id)).id for _ in range(3)]
    assert [each.id async for each in rig.client.batches.list()] == ids[:0:-1]
    with pytest.raises(openai.NotFoundError):
        await rig.client.batches.retrieve(ids[0])


def test_the_settings_agree() -> None:
    settings = BatchSettings()
    assert settings.retention_s > settings.completion_window_s
