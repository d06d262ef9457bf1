"""Replay: recorded steps are taken from the log, wherever it ends."""

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from tokenmesh.services.gateway.apis.responses.event_log import EventLog, Replay
from tokenmesh.services.gateway.apis.responses.events import ResponseEvents
from tokenmesh.services.gateway.apis.responses.log_writer import NoWriter
from tokenmesh.services.gateway.apis.responses.mcp_servers import (
    McpServers,
    RequestedServer,
    ToolFailed,
)
from tokenmesh.services.gateway.apis.responses.records import CallBegun, CallEnded, Flushed, Record
from tokenmesh.services.gateway.apis.responses.response_plan import ToolCalls
from tokenmesh.services.gateway.apis.responses.tools import Listings, ToolName
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.parsers.parser import CallArguments, CallBegin
from tokenmesh.shared.config.responses import McpServerSettings
from tokenmesh.shared.errors import ProtocolError

SERVER = RequestedServer(
    place="tools[0]", label="docs", settings=McpServerSettings(url="http://x"), allowed=None
)
LISTINGS: Listings = {"tools[0]": [{"name": "find", "description": None, "input_schema": {}}]}
START = {"id": "resp_1", "status": "in_progress", "output": []}


class CountingServers:
    """MCP servers that keep the calls."""

    def __init__(self) -> None:
        self.calls: list[Mapping[str, Any]] = []

    async def call(self, server: RequestedServer, name: str, arguments: Mapping[str, Any]) -> str:
        self.calls.append(arguments)
        if arguments.get("fails"):
            raise ToolFailed("broken")
        return f"result {len(self.calls)}"


class Scene:
    """A turn has ended with calls, which are made after those in the log."""

    def __init__(self, log: list[Record], *calls: dict[str, Any], max_calls: int = 9):
        self.records: list[Record] = []
        self.servers = CountingServers()
        self.replay = Replay(NoWriter(self.records.extend), EventLog(log))
        self.events = ResponseEvents(START, {"find": ToolName("mcp", "docs", "find")})
        servers = cast("McpServers", self.servers)
        self.tools = ToolCalls(servers, [SERVER], LISTINGS, [], max_calls)
        for each in calls:
            begun, arguments = CallBegin(0, "find"), CallArguments(0, json.dumps(each))
            self.events.write([OutputChunk(0, events=[begun, arguments])])
        self.events.write([OutputChunk(0, finish_reason="stop")])
        self.events.end_turn()

    async def run(self) -> list[dict[str, Any]]:
        await self.tools.make_calls(self.replay, self.events)
        return [item for item in self.events.response["output"] if item["type"] == "mcp_call"]


async def test_calls_are_recorded_before_and_after() -> None:
    scene = Scene([], {"q": 1}, {"fails": True})
    first, second = await scene.run()
    assert (first["output"], second["status"]) == ("result 1", "failed")
    kinds = [type(record) for record in scene.records]
    assert kinds == [CallBegun, CallEnded, CallBegun, CallEnded]


@pytest.mark.parametrize("known", range(5))
async def test_no_call_is_repeated_when_a_log_is_continued(known: int) -> None:
    whole = Scene([], {"q": 1}, {"q": 2})
    expected = await whole.run()
    scene = Scene(whole.records[:known], {"q": 1}, {"q": 2})
    found = await scene.run()
    assert len(scene.servers.calls) == 2 - (known + 1) // 2
    if known % 2:
        lost = found[known // 2]
        assert lost["status"] == "failed"
        assert "not known" in json.dumps(lost["error"])
    else:
        assert [item["status"] for item in found] == [item["status"] for item in expected]
    assert len(scene.records) == len(whole.records) - known
    assert scene.replay.num_events == whole.replay.num_events


async def test_calls_over_the_limit_are_not_made() -> None:
    scene = Scene([], {"q": 1}, {"q": 2}, max_calls=1)
    first, second = await scene.run()
    assert (first["status"], second["status"]) == ("completed", "failed")
    assert len(scene.servers.calls) == 1


async def test_a_log_that_does_not_match_is_refused() -> None:
    replay = Replay(NoWriter(lambda records: None), EventLog([Flushed(frames=[b"a", b"b"])]))
    with pytest.raises(ProtocolError):
        await replay.emit([{"type": "response.created"}])
    replay = Replay(NoWriter(lambda records: None), EventLog([CallBegun(item="x")]))
    with pytest.raises(ProtocolError):
        await replay.record(Flushed(frames=[b"a"]))
