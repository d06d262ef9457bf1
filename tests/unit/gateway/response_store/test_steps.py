"""Steps: what was done before is taken from the record, whatever was recorded last."""

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.parsers.events import CallArguments, CallBegin
from tokenmesh.services.gateway.responses.event_log import EventLog, Log
from tokenmesh.services.gateway.responses.events import ResponseEvents
from tokenmesh.services.gateway.responses.log_writer import NoWriter
from tokenmesh.services.gateway.responses.mcp_offer import Listings
from tokenmesh.services.gateway.responses.mcp_requested import RequestedServer
from tokenmesh.services.gateway.responses.mcp_servers import McpServers, ToolFailed
from tokenmesh.services.gateway.responses.records import CallBegun, CallEnded, Flushed, Record
from tokenmesh.services.gateway.responses.replay import Replay
from tokenmesh.services.gateway.responses.tool_calls import ToolCalls
from tokenmesh.services.gateway.responses.tools import ToolName
from tokenmesh.shared.config.responses import McpServerSettings
from tokenmesh.shared.errors import ProtocolError

SERVER = RequestedServer(
    place="tools[0]", label="docs", settings=McpServerSettings(url="http://x"), allowed=None
)
LISTINGS: Listings = {"tools[0]": [{"name": "find", "description": None, "input_schema": {}}]}
START = {"id": "resp_1", "status": "in_progress", "output": []}


class Asker:
    """MCP servers that count."""

    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []

    async def call(self, server: RequestedServer, name: str, arguments: Mapping[str, Any]) -> str:
        self.calls.append(arguments)
        if arguments.get("fails"):
            raise ToolFailed("broken")
        return f"result {len(self.calls)}"


class Scene:
    """A turn with calls has ended, and they are made from a history on."""

    def __init__(self, history: list[Record], *arguments: dict[str, Any], max_calls: int = 9):
        self.records: list[Record] = []
        self.asker = Asker()
        self.steps = Replay(EventLog(Log(history)), NoWriter(self.records.extend))
        self.events = ResponseEvents(START, {"find": ToolName("mcp", "docs", "find")})
        asker = cast("McpServers", self.asker)
        self.tools = ToolCalls(asker, [SERVER], LISTINGS, [], max_calls)
        for each in arguments:
            begun, told = CallBegin(0, "find"), CallArguments(0, json.dumps(each))
            self.events.write([OutputChunk(0, events=[begun, told])])
        self.events.write([OutputChunk(0, finish_reason="stop")])
        self.events.end_turn()

    async def run(self) -> list[dict[str, Any]]:
        await self.tools.make_calls(self.steps, self.events)
        return [item for item in self.events.response["output"] if item["type"] == "mcp_call"]


async def test_calls_are_recorded_before_and_after() -> None:
    scene = Scene([], {"q": 1}, {"fails": True})
    first, second = await scene.run()
    assert (first["output"], second["status"]) == ("result 1", "failed")
    kinds = [type(record) for record in scene.records]
    assert kinds == [CallBegun, CallEnded, CallBegun, CallEnded]


@pytest.mark.parametrize("known", range(5))
async def test_whoever_goes_on_calls_nothing_twice(known: int) -> None:
    whole = Scene([], {"q": 1}, {"q": 2})
    expected = await whole.run()
    scene = Scene(whole.records[:known], {"q": 1}, {"q": 2})
    found = await scene.run()
    assert len(scene.asker.calls) == 2 - (known + 1) // 2
    if known % 2:
        lost = found[known // 2]
        assert lost["status"] == "failed"
        assert "not known" in json.dumps(lost["error"])
    else:
        assert [item["status"] for item in found] == [item["status"] for item in expected]
    assert len(scene.records) == len(whole.records) - known
    assert scene.steps.num_told == whole.steps.num_told


async def test_calls_over_the_limit_are_not_made() -> None:
    scene = Scene([], {"q": 1}, {"q": 2}, max_calls=1)
    first, second = await scene.run()
    assert (first["status"], second["status"]) == ("completed", "failed")
    assert len(scene.asker.calls) == 1


async def test_a_history_that_went_another_way_is_refused() -> None:
    steps = Replay(EventLog(Log([Flushed(frames=[b"a", b"b"])])), NoWriter(lambda records: None))
    with pytest.raises(ProtocolError):
        await steps.tell([{"type": "response.created"}])
    steps = Replay(EventLog(Log([CallBegun(item="x")])), NoWriter(lambda records: None))
    with pytest.raises(ProtocolError):
        await steps.record(Flushed(frames=[b"a"]))
