"""Items of an output match the OpenAPI document in every state."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from tokenmesh.services.gateway.apis.responses.output_items import (
    EventRecorder,
    McpCallItem,
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    add_listing,
)
from tokenmesh.services.gateway.apis.responses.shapes import OutputItem
from tokenmesh.services.gateway.apis.responses.tools import ToolName
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.api_table import ApiTable
from tokenmesh.services.gateway.document import response_components

NAME = ToolName("mcp", "shop", "buy")


def written(item: OpenItem) -> None:
    item.write('{"input": "7"}')
    item.close("completed")


MAKERS: tuple[Callable[[EventRecorder], None], ...] = (
    lambda each: written(OpenMessage(each, has_logprobs=True)),
    lambda each: written(OpenMessage(each, has_logprobs=False)),
    lambda each: written(OpenReasoning(each)),
    lambda each: written(OpenFunctionCall(each, ToolName(name="f", namespace="n"), "call_1")),
    lambda each: written(OpenCustomCall(each, ToolName("custom", name="f"), "call_1")),
    lambda each: add_listing(each, "shop", [{"name": "buy", "input_schema": {}}]),
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
def test_items_in_output_and_events_match_the_schemas(recorder: EventRecorder) -> None:
    reported = [event["item"] for event in recorder.take() if "item" in event]
    assert len(reported) >= 2
    for item in [*reported, *recorder.output]:
        as_described = msgspec.convert(item, OutputItem)
        assert msgspec.to_builtins(as_described) == item


def test_the_document_distinguishes_items_by_type() -> None:
    schemas: dict[str, Any] = response_components(ApiTable(APIS))
    items = schemas["responses.Response"]["properties"]["output"]["items"]
    assert items["discriminator"]["mapping"].keys() == {
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "mcp_list_tools",
        "mcp_call",
    }
