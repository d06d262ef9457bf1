"""Items that the gateway's own work makes: calls of MCP tools, and what MCP servers offer."""

from typing import Any

from tokenmesh.services.gateway.responses.open_items import Status
from tokenmesh.services.gateway.responses.recorder import EventRecorder
from tokenmesh.services.gateway.responses.tools import ToolName


class McpCallItem:
    """A call that the gateway makes: an `OpenItem` that is finished by the tool's answer."""

    def __init__(self, recorder: EventRecorder, name: ToolName) -> None:
        self.name = name
        self.id = recorder.make_id("mcp")
        self.arguments = ""
        """JSON text of an object, as far as the model wrote it."""
        self._recorder = recorder
        item = {
            "id": self.id,
            "type": "mcp_call",
            "server_label": name.server_label,
            "name": name.name,
            "arguments": "",
            "approval_request_id": None,
            "output": None,
            "error": None,
            "status": "in_progress",
        }
        self._index = recorder.add(item)
        self._emit("mcp_call.in_progress")

    def write(self, text: str) -> None:
        """See `OpenItem`."""
        self.arguments += text
        self._emit("mcp_call_arguments.delta", delta=text)

    def close(self, status: Status) -> None:
        """The arguments are complete, the call is still to be made; unless `incomplete`."""
        self._emit("mcp_call_arguments.done", arguments=self.arguments)
        if status == "incomplete":
            self._recorder.finish(self._index, arguments=self.arguments, status=status)
        else:
            self._recorder.change(self._index, arguments=self.arguments, status="calling")

    def give_up(self) -> None:
        """The call is not made after all."""
        self._recorder.finish(self._index, status="incomplete")

    def succeed(self, output: str) -> None:
        """What the tool answered."""
        self._emit("mcp_call.completed")
        self._recorder.finish(self._index, output=output, status="completed")

    def fail(self, error: dict[str, Any]) -> None:
        """`error`: of OpenAI's shapes, such as `{"type": "mcp_protocol_error", ...}`."""
        self._emit("mcp_call.failed")
        self._recorder.finish(self._index, error=error, status="failed")

    def _emit(self, kind: str, **fields: Any) -> None:
        place = {"item_id": self.id, "output_index": self._index}
        self._recorder.emit(f"response.{kind}", place, **fields)


class McpListing:
    """The gateway asks a server for its tools."""

    def __init__(self, recorder: EventRecorder, server_label: str) -> None:
        self._recorder = recorder
        self._id = recorder.make_id("mcpl")
        item = {"id": self._id, "type": "mcp_list_tools", "server_label": server_label}
        self._index = recorder.add({**item, "tools": [], "error": None})
        self._emit("in_progress")

    def succeed(self, tools: list[dict[str, Any]]) -> None:
        """`tools`: name, description, input_schema, annotations of each."""
        self._emit("completed")
        self._recorder.finish(self._index, tools=tools)

    def fail(self, error: str) -> None:
        """The server could not be asked."""
        self._emit("failed")
        self._recorder.finish(self._index, error=error)

    def _emit(self, kind: str) -> None:
        place = {"item_id": self._id, "output_index": self._index}
        self._recorder.emit(f"response.mcp_list_tools.{kind}", place)
