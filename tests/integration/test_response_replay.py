"""A response whose log is cut anywhere is continued from there to the same end."""

from collections.abc import AsyncIterator, Callable

import httpx
import msgspec
import pytest

from tests.fakes.back_end import BackEnd
from tests.fakes.mcp_server import Tools, mcp_server
from tests.fakes.response_client import Event, ResponseClient, numbers
from tests.fakes.tool_turns import OFFER, call, in_turns
from tests.fakes.worker import CACHED_TOKENS
from tests.servers import Server, bus_settings_of
from tokenmesh.services.gateway.apis.responses.records import (
    CallBegun,
    Flushed,
    Record,
    encode_record,
    frames_of,
    join_records,
)
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs, open_journal
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.ids import GatewayId, ResponseId
from tokenmesh.shared.subjects import response_log

DEAD = GatewayId("gateway-gone")
EXTRA = b'event: extra\ndata: {"type": "extra"}\n\n'
THINKS = "<think>\nA sum, then.\n</think>\n\n"


@pytest.fixture
async def tools() -> AsyncIterator[Tools]:
    async with mcp_server() as server:
        yield server


@pytest.fixture
async def mesh(
    tools: Tools, start_nats: Callable[[], Server], redis_settings: RedisSettings
) -> AsyncIterator[BackEnd]:
    mesh = BackEnd(
        bus_settings_of(start_nats()),
        redis_settings,
        responses={
            "mcp_servers": {"calculator": {"url": tools.url}},
            "adopt_interval_s": 0.02,
            "poll_s": 0.05,
        },
        service={"beat_interval_s": 0.05, "missed_beats": 1},
    )
    async with mesh:
        mesh.tokenizer.reasoning_parser = "qwen3"
        mesh.tokenizer.tool_call_parser = "hermes"
        answers = (THINKS + call("add", a=17, b=25), THINKS + "It is <42>, I \u2764 think.")
        mesh.workers[0].script = in_turns(*answers)
        yield mesh


@pytest.fixture
async def client(mesh: BackEnd) -> AsyncIterator[ResponseClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=15) as http:
        yield ResponseClient(http, mesh.model)


async def cut(logs: ResponseLogs, response_id: ResponseId, records: list[Record]) -> None:
    """Write a beginning of a log as a dead gateway."""
    await logs.delete(response_id)
    data = join_records([encode_record(record) for record in records])
    await logs.journal.append(response_log(response_id), data, 0)
    await logs.marks.set(DEAD, response_id)


def story(events: list[Event]) -> tuple[list[str], list[object], dict[str, object]]:
    """Items, status and usage of a response."""
    done = [each for each in events if each["type"] == "response.output_item.done"]
    kinds = [each["type"] for each in events if not each["type"].endswith("delta")]
    return kinds, [each["item"] for each in done], events[-1]["response"]


@pytest.mark.timeout(60)
async def test_a_log_cut_anywhere_is_continued_to_the_same_end(
    mesh: BackEnd, client: ResponseClient, tools: Tools
) -> None:
    whole = await client.stream(background=True, tools=[OFFER], reasoning={"effort": "low"})
    response_id = ResponseId(whole[0]["response"]["id"])
    logs = ResponseLogs(open_journal(mesh.bus, mesh.settings.responses), mesh.settings.responses)
    records = (await logs.read(response_id)).records
    assert len(records) > 20
    usage = whole[-1]["response"]["usage"]
    # The log of two turns.
    assert usage["input_tokens_details"]["cached_tokens"] == 2 * CACHED_TOKENS
    assert 2 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    lost = next(index for index, each in enumerate(records) if isinstance(each, CallBegun)) + 1
    for count in {1, 2, 3, 4, 5, 6, *range(7, len(records), 14), lost - 1, lost, lost + 1}:
        tools.calls.clear()
        await cut(logs, response_id, records[:count])
        events = await client.events(response_id)
        assert numbers(events) == list(range(len(events))), count
        seen = sum(len(getattr(record, "frames", ())) for record in records[:count])
        assert events[:seen] == whole[:seen], count
        # the events first: they say why a call was not made
        if count == lost:
            assert "response.mcp_call.failed" in [event["type"] for event in events]
        else:
            assert story(events) == story(whole), count
        assert len(tools.calls) == (0 if count >= lost else 1), count
        await mesh.until(lambda: not len(mesh.gateway.core.mesh.streams))


async def test_a_log_that_does_not_match_fails_and_keeps_its_events(
    mesh: BackEnd, client: ResponseClient
) -> None:
    whole = await client.stream(background=True)
    response_id = ResponseId(whole[0]["response"]["id"])
    logs = ResponseLogs(open_journal(mesh.bus, mesh.settings.responses), mesh.settings.responses)
    begun, *records = (await logs.read(response_id)).records
    for number, record in enumerate(records[:4]):
        if not isinstance(record, Flushed):
            continue
        # As if another version had recorded more events.
        other = msgspec.structs.replace(record, frames=[*record.frames, EXTRA])
        reported: list[Record] = [begun, *records[:number], other, *records[number + 1 : 8]]
        await cut(logs, response_id, reported)
        events = await client.events(response_id)
        assert events[-1]["type"] == "response.failed"
        assert len(events) == sum(len(frames_of(each)) for each in reported) + 1
        assert (await client.get(response_id))["status"] == "failed"
