"""Items of a response's output while they are generated, and the events that report them."""

import re
from abc import ABC, abstractmethod
from typing import Any, Final, Literal

from tokenmesh.services.gateway.apis.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.tools import ToolName, to_input

Event = dict[str, Any]
OutputStatus = Literal["completed", "incomplete"]

_RESPONSE: Final = "resp_"
_ITEM: Final = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})i?[0-9a-f]{4,8}")


def input_item_id(prefix: str, response_id: str, index: int) -> str:
    """Such as `msg_5f0c...i0002`: the same in every replay, and it names the response."""
    return f"{prefix}_{response_id.removeprefix(_RESPONSE)}i{index:04x}"


def response_of_item(item_id: str) -> str | None:
    """The id of the response that has the item; None for an id of another form."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else _RESPONSE + found[1]


class EventRecorder:
    """Numbers the events and keeps the output. Items in events are never changed afterwards."""

    def __init__(self, response_id: str) -> None:
        self.output: list[Json] = []
        self._response_id = response_id
        self._events: list[Event] = []
        self._number = 0

    def emit(self, kind: str, item: Event | None = None, /, **fields: Any) -> None:
        """Add an event; `item`: fields that identify its item."""
        number = self._number
        self._events.append({"type": kind, "sequence_number": number, **(item or {}), **fields})
        self._number += 1

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def make_id(self, prefix: str) -> str:
        """An id for the next item, such as `msg_5f0c...0002`."""
        response = self._response_id.removeprefix(_RESPONSE)
        return f"{prefix}_{response}{len(self.output):04x}"

    def add(self, item: Json) -> int:
        """Begin an item; returns its index in the output."""
        index = len(self.output)
        self.output.append(item)
        self.emit("response.output_item.added", output_index=index, item=item)
        return index

    def change(self, index: int, **fields: Any) -> Json:
        """Replace the item by a copy with these fields."""
        item = {**self.output[index], **fields}
        self.output[index] = item
        return item

    def finish(self, index: int, **fields: Any) -> None:
        item = self.change(index, **fields)
        self.emit("response.output_item.done", output_index=index, item=item)


class OpenItem(ABC):
    """An item in generation: takes text until it is closed."""

    def __init__(self, recorder: EventRecorder, prefix: str, item: Json) -> None:
        self.id = recorder.make_id(prefix)
        self._recorder = recorder
        self._texts: list[str] = []
        self._index = recorder.add({"id": self.id, **item})
        self._place: Event = {"item_id": self.id, "output_index": self._index}

    @abstractmethod
    def write(self, text: str) -> None: ...

    @abstractmethod
    def close(self, status: OutputStatus) -> None:
        """End the text; `incomplete` when the model was cut off in it."""

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._recorder.emit(f"response.{kind}", self._place, **fields)

    def _finish(self, **fields: Any) -> None:
        self._recorder.finish(self._index, **fields)


class OpenMessage(OpenItem):
    """Text of the answer."""

    def __init__(self, recorder: EventRecorder, has_logprobs: bool) -> None:
        self._logprobs: list[ChatLogprob] = []
        self._has_logprobs = has_logprobs
        item: Json = {"type": "message", "role": "assistant", "content": []}
        super().__init__(recorder, "msg", {**item, "status": "in_progress"})
        self._place["content_index"] = 0
        self._emit("content_part.added", part=self._part())

    def write(self, text: str, logprobs: list[ChatLogprob] | None = None) -> None:
        self._texts.append(text)
        self._logprobs.extend(logprobs or ())
        self._emit("output_text.delta", delta=text, logprobs=logprobs or [])

    def close(self, status: OutputStatus) -> None:
        part = self._part()
        self._emit("output_text.done", text=part["text"], logprobs=part["logprobs"] or [])
        self._emit("content_part.done", part=part)
        self._finish(content=[part], status=status)

    def _part(self) -> Json:
        logprobs = list(self._logprobs) if self._has_logprobs else None
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}


class OpenReasoning(OpenItem):
    def __init__(self, recorder: EventRecorder) -> None:
        item: Json = {"type": "reasoning", "summary": [], "content": []}
        super().__init__(
            recorder, "rs", {**item, "encrypted_content": None, "status": "in_progress"}
        )
        self._place["content_index"] = 0
        self._emit("content_part.added", part=self._part())

    def write(self, text: str) -> None:
        self._texts.append(text)
        self._emit("reasoning_text.delta", delta=text)

    def close(self, status: OutputStatus) -> None:
        part = self._part()
        self._emit("reasoning_text.done", text=part["text"])
        self._emit("content_part.done", part=part)
        self._finish(content=[part], status=status)

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self._text}


def _names(tool: ToolName) -> Json:
    """A tool of a namespace is named by both."""
    names = {"name": tool.name}
    return names if tool.namespace is None else {**names, "namespace": tool.namespace}


class OpenFunctionCall(OpenItem):
    """A call that the client executes."""

    def __init__(self, recorder: EventRecorder, name: ToolName, call_id: str) -> None:
        self._name = name.name
        item = {"type": "function_call", "call_id": call_id, **_names(name)}
        super().__init__(recorder, "fc", {**item, "arguments": "", "status": "in_progress"})

    def write(self, text: str) -> None:
        self._texts.append(text)
        self._emit("function_call_arguments.delta", delta=text)

    def close(self, status: OutputStatus) -> None:
        arguments = self._text
        self._emit("function_call_arguments.done", name=self._name, arguments=arguments)
        self._finish(arguments=arguments, status=status)


class OpenCustomCall(OpenItem):
    """A call of a custom tool. Its input is known only when the arguments are complete."""

    def __init__(self, recorder: EventRecorder, name: ToolName, call_id: str) -> None:
        item = {"type": "custom_tool_call", "call_id": call_id, **_names(name)}
        super().__init__(recorder, "ctc", {**item, "input": "", "status": "in_progress"})

    def write(self, text: str) -> None:
        self._texts.append(text)

    def close(self, status: OutputStatus) -> None:
        text = to_input(self._text)
        if text:
            self._emit("custom_tool_call_input.delta", delta=text)
        self._emit("custom_tool_call_input.done", input=text)
        self._finish(input=text, status=status)


class McpCallItem(OpenItem):
    """A call that the gateway executes: after `close` it waits for the tool's result."""

    def __init__(self, recorder: EventRecorder, name: ToolName) -> None:
        self.name = name
        item = {
            "type": "mcp_call",
            "server_label": name.server_label,
            "name": name.name,
            "arguments": "",
            "approval_request_id": None,
            "output": None,
            "error": None,
            "status": "in_progress",
        }
        super().__init__(recorder, "mcp", item)
        self._emit("mcp_call.in_progress")

    @property
    def arguments(self) -> str:
        """JSON text of an object."""
        return self._text

    def write(self, text: str) -> None:
        self._texts.append(text)
        self._emit("mcp_call_arguments.delta", delta=text)

    def close(self, status: OutputStatus) -> None:
        self._emit("mcp_call_arguments.done", arguments=self.arguments)
        if status == "incomplete":
            self._finish(arguments=self.arguments, status=status)
        else:
            self._recorder.change(self._index, arguments=self.arguments, status="calling")

    def give_up(self) -> None:
        """End the item without a call."""
        self._finish(status="incomplete")

    def succeed(self, output: str) -> None:
        """End the item with the tool's result."""
        self._emit("mcp_call.completed")
        self._finish(output=output, status="completed")

    def fail(self, error: Json) -> None:
        """`error`: in one of OpenAI's shapes, such as `{"type": "mcp_protocol_error", ...}`."""
        self._emit("mcp_call.failed")
        self._finish(error=error, status="failed")


def add_listing(recorder: EventRecorder, server_label: str, tools: list[Json]) -> None:
    """Add an item with the tools of an MCP server.

    `tools`: name, description, input_schema, annotations of each.
    """
    item_id = recorder.make_id("mcpl")
    item = {"id": item_id, "type": "mcp_list_tools", "server_label": server_label}
    index = recorder.add({**item, "tools": [], "error": None})
    place = {"item_id": item_id, "output_index": index}
    recorder.emit("response.mcp_list_tools.in_progress", place)
    recorder.emit("response.mcp_list_tools.completed", place)
    recorder.finish(index, tools=tools)
