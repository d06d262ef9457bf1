"""Items of an output are what the OpenAPI document says, at every step of their making."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tokenmesh.services.gateway.document.answers import answer_components
from tokenmesh.services.gateway.responses.described import OutputItem
from tokenmesh.services.gateway.responses.open_items import (
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
)
from tokenmesh.services.gateway.responses.recorder import EventRecorder
from tokenmesh.services.gateway.responses.server_calls import McpCallItem, McpListing
from tokenmesh.services.gateway.responses.tools import ToolName

NAME = ToolName("mcp", "shop", "buy")


def written(item: OpenItem) -> None:
    item.write('{"input": "7"}')
    item.close("completed")


MAKERS: tuple[Callable[[EventRecorder], None], ...] = (
    lambda each: written(OpenMessage(each, has_logprobs=True)),
    lambda each: written(OpenMessage(each, has_logprobs=False)),
    lambda each: written(OpenReasoning(each)),
    lambda each: written(OpenFunctionCall(each, "f", "call_1")),
    lambda each: written(OpenCustomCall(each, "f", "call_1")),
    lambda each: McpListing(each, "shop").succeed([{"name": "buy", "input_schema": {}}]),
    lambda each: McpListing(each, "shop").fail("it is closed"),
)
ENDS: tuple[Callable[[McpCallItem], None], ...] = (
    lambda call: call.succeed("done"),
    lambda call: call.fail({"type": "mcp_protocol_error", "code": 1, "message": "no"}),
    lambda call: call.give_up(),
)


def outputs() -> Iterator[EventRecorder]:
    for make in MAKERS:
        recorder = EventRecorder("resp_1")
        make(recorder)
        yield recorder
    for end in ENDS:
        recorder = EventRecorder("resp_1")
        call = McpCallItem(recorder, NAME)
        written(call)
        end(call)
        yield recorder


@pytest.mark.parametrize("recorder", list(outputs()))
def test_every_item_and_what_events_tell_of_it_fit(recorder: EventRecorder) -> None:
    told = [event["item"] for event in recorder.take() if "item" in event]
    assert len(told) >= 2
    for item in [*told, *recorder.output]:
        as_described = msgspec.convert(item, OutputItem)
        assert msgspec.to_builtins(as_described) == item


def test_the_document_tells_items_apart_by_their_type() -> None:
    schemas: dict[str, Any] = answer_components()
    items = schemas["responses.Response"]["properties"]["output"]["items"]
    assert items["discriminator"]["mapping"].keys() == {
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "mcp_list_tools",
        "mcp_call",
    }
