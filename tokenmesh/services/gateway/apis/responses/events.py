"""ResponseEvents: the events of a response, and the Response object that they add up to.

ResponseWriter writes them for a response that is not stored and has one turn.

A response may have several model turns with calls of MCP tools between them. The events depend only
on the first state of the response and on the arguments, so a replay generates the same events.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.apis.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.apis.openai.translation import FieldNames, Json
from tokenmesh.services.gateway.apis.responses.content_logprobs import ContentLogprobs
from tokenmesh.services.gateway.apis.responses.event_log import encode_frames
from tokenmesh.services.gateway.apis.responses.output_items import (
    Event,
    EventRecorder,
    McpCallItem,
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OutputStatus,
    add_listing,
)
from tokenmesh.services.gateway.apis.responses.raw_messages import RawMessages
from tokenmesh.services.gateway.apis.responses.shapes import error_facts, usage_fields
from tokenmesh.services.gateway.apis.responses.tools import ToolName
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.http.sse import COMMENT
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Reasoning,
)
from tokenmesh.shared.errors import TokenMeshError


class ResponseEvents:
    """Methods return the events that they cause."""

    def __init__(
        self,
        response: Mapping[str, Any],
        names: Mapping[str, ToolName],
        *,
        logprobs: LogprobShapes | None = None,
        raw: RawMessages | None = None,
    ) -> None:
        """`response`: its first state, from `shapes.response_object`.

        `logprobs` None: text has no log-probabilities; `raw` None: no token lists.
        """
        self.server_calls: list[McpCallItem] = []
        """MCP calls of the last turn that the gateway has to execute."""
        self.finish_reason: str | None = None
        """Finish reason of the last turn."""
        self._response = dict(response)
        self._names = names
        self._shapes = logprobs
        self._raw = raw
        self._recorder = EventRecorder(response["id"])
        self._call_ids: set[str] = set()
        self._begin_turn()

    @property
    def response(self) -> Json:
        """The current Response object."""
        return {**self._response, "output": list(self._recorder.output)}

    def _begin_turn(self) -> None:
        self._open: OpenItem | None = None
        """The open item of text or reasoning."""
        self._calling: OpenItem | None = None
        """The last call. It stays open during text: an unfinished call may continue after it."""
        self._blank: str = ""
        """White space that begins a message only if text follows."""
        self._blank_logprobs: list[ChatLogprob] = []
        self._logprobs = ContentLogprobs(self._shapes) if self._shapes is not None else None
        self._first_item = len(self._recorder.output)

    def queue(self) -> list[Event]:
        """The response is created and not begun yet."""
        return self._emit("created", status="queued") + self._emit("queued")

    def begin(self, *, is_created: bool = False) -> list[Event]:
        """The response begins; `is_created`: `queue` was called before."""
        created = [] if is_created else self._emit("created", status="in_progress")
        return created + self._emit("in_progress", status="in_progress")

    def write(self, chunks: Sequence[OutputChunk]) -> list[Event]:
        """Output of the model."""
        if self._raw is not None:
            self._raw.write(chunks)
        for chunk in chunks:
            stretches = iter(self._logprobs.push(chunk) if self._logprobs is not None else ())
            for event in chunk.all_events():
                if isinstance(event, Content):
                    self._content(event.text, next(stretches, []))
                elif isinstance(event, Reasoning):
                    self._reasoning(event.text)
                elif isinstance(event, CallBegin):
                    self._call(event)
                else:
                    self._arguments(event)
            if chunk.finish_reason is not None:
                self.finish_reason = chunk.finish_reason
        return self._recorder.take()

    def end_turn(self, packed_prompt: bytes = b"") -> list[Event]:
        """The turn has ended; afterwards `server_calls` are to be executed."""
        if self._raw is not None:
            self._raw.end_turn(packed_prompt)
            self._response |= self._raw.fields()
        is_empty = len(self._recorder.output) == self._first_item
        if self._blank and is_empty:
            text, logprobs = self._blank, self._blank_logprobs
            self._message().write(text, logprobs)
        is_cut = self.finish_reason == "length"
        self._close("incomplete" if is_cut else "completed")
        if is_cut:
            # The response ends here, so no turn would read the results.
            for call in self.server_calls:
                call.give_up()
            self.server_calls.clear()
        self._begin_turn()
        return self._recorder.take()

    def succeed(self, call: McpCallItem, output: str) -> list[Event]:
        """An MCP call has succeeded."""
        self.server_calls.remove(call)
        call.succeed(output)
        return self._recorder.take()

    def fail_call(self, call: McpCallItem, error: Json) -> list[Event]:
        """An MCP call has failed."""
        self.server_calls.remove(call)
        call.fail(error)
        return self._recorder.take()

    def list_tools(self, server_label: str, tools: list[Json]) -> list[Event]:
        """Add an item with the tools of an MCP server."""
        add_listing(self._recorder, server_label, tools)
        return self._recorder.take()

    def complete(self, usage: Json | None, *, is_cut: bool = False) -> list[Event]:
        """The response is complete; `is_cut`: no tokens are left for another turn."""
        if self.finish_reason != "length" and not is_cut:
            return self._emit("completed", status="completed", usage=usage)
        details = {"reason": "max_output_tokens"}
        incomplete = {"status": "incomplete", "incomplete_details": details}
        return self._emit("incomplete", **incomplete, usage=usage)

    def fail(self, error: TokenMeshError, usage: Json | None = None) -> list[Event]:
        """The response has failed. Its output so far is kept."""
        self._close_all()
        facts = error_facts(error)
        self._recorder.emit("error", **facts, param=error.param)
        return self._emit("failed", status="failed", error=facts, usage=usage)

    def cancel(self, usage: Json | None = None) -> list[Event]:
        """The response was cancelled. OpenAI has no event for it, so `incomplete` reports it."""
        self._close_all()
        return self._emit("incomplete", status="cancelled", usage=usage)

    def _close_all(self) -> None:
        self._close("incomplete")
        for call in self.server_calls:
            call.fail({"type": "mcp_tool_execution_error", "content": "the call was abandoned"})
        self.server_calls.clear()

    def _emit(self, kind: str, **fields: Any) -> list[Event]:
        self._response.update(fields)
        self._recorder.emit(f"response.{kind}", response=self.response)
        return self._recorder.take()

    def _content(self, text: str, logprobs: list[ChatLogprob]) -> None:
        message = self._open if isinstance(self._open, OpenMessage) else None
        if message is None:
            self._blank += text
            self._blank_logprobs.extend(logprobs)
            if not text.strip():
                return
            text, logprobs = self._blank, self._blank_logprobs
            message = self._message()
        message.write(text, logprobs)

    def _message(self) -> OpenMessage:
        self._close_text("completed")
        self._open = message = OpenMessage(self._recorder, self._shapes is not None)
        return message

    def _reasoning(self, text: str) -> None:
        if not isinstance(self._open, OpenReasoning):
            self._close_text("completed")
            self._open = OpenReasoning(self._recorder)
        self._open.write(text)

    def _call(self, begin: CallBegin) -> None:
        self._close("completed")
        name = self._names.get(begin.name) or ToolName(name=begin.name)
        if name.kind == "mcp":
            self._calling = McpCallItem(self._recorder, name)
            return
        call_id = begin.model_id
        if call_id is None or call_id in self._call_ids:
            call_id = self._recorder.make_id("call")
        self._call_ids.add(call_id)
        kind = OpenCustomCall if name.kind == "custom" else OpenFunctionCall
        self._calling = kind(self._recorder, name, call_id)

    def _arguments(self, event: CallArguments) -> None:
        assert self._calling is not None, "arguments without a call"
        self._calling.write(event.text)

    def _close(self, status: OutputStatus) -> None:
        self._close_text(status)
        call, self._calling = self._calling, None
        if call is None:
            return
        call.close(status)
        if isinstance(call, McpCallItem) and status == "completed":
            self.server_calls.append(call)

    def _close_text(self, status: OutputStatus) -> None:
        self._blank, self._blank_logprobs = "", []
        item, self._open = self._open, None
        if item is not None:
            item.close(status)


class ResponseWriter:
    """The `BodyWriter` of a response that is not stored and has one turn."""

    keep_alive = COMMENT

    def __init__(self, events: ResponseEvents, names: FieldNames) -> None:
        self._events = events
        self._names = names
        self._has_begun = False

    def begin(self, delivery: Delivery) -> bytes:
        return _join(self._begin())

    def write(self, delivery: Delivery, pieces: list[OutputChunk]) -> bytes:
        return _join(self._write(pieces))

    def end(self, delivery: Delivery) -> bytes:
        return _join(self._end(delivery))

    def fail(self, error: TokenMeshError) -> bytes:
        # If only keep-alive comments were sent, the stream has not begun.
        return _join(self._begin() + self._events.fail(self._names.rename(error)))

    def whole(self, delivery: Delivery, pieces: list[OutputChunk]) -> Json:
        self._write(pieces)
        self._end(delivery)
        return self._events.response

    def _write(self, chunks: list[OutputChunk]) -> list[Event]:
        return self._begin() + self._events.write(chunks)

    def _begin(self) -> list[Event]:
        has_begun, self._has_begun = self._has_begun, True
        return [] if has_begun else self._events.begin()

    def _end(self, delivery: Delivery) -> list[Event]:
        ended = self._events.end_turn(delivery.prompts[0].packed_ids)
        return ended + self._events.complete(usage_fields([delivery.usage()]))


def _join(events: list[Event]) -> bytes:
    return b"".join(encode_frames(events))
