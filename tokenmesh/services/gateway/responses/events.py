"""ResponseEvents: what happens to a response, as events and as the Response that they add up to.

A response may take several turns of the model, with calls of MCP tools in between. All of it is a
function of the response's first state and of what is passed in: a replay makes the same events.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenmesh.services.gateway.generation.chunk import OutputChunk
from tokenmesh.services.gateway.openai.logprobs import LogprobShapes
from tokenmesh.services.gateway.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Reasoning,
)
from tokenmesh.services.gateway.responses.content_logprobs import ContentLogprobs
from tokenmesh.services.gateway.responses.open_items import (
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
)
from tokenmesh.services.gateway.responses.raw_messages import RawMessages
from tokenmesh.services.gateway.responses.recorder import Event, EventRecorder
from tokenmesh.services.gateway.responses.server_calls import McpCallItem, McpListing
from tokenmesh.services.gateway.responses.shapes import error_facts
from tokenmesh.services.gateway.responses.tools import ToolName
from tokenmesh.shared.errors import TokenMeshError

_FUNCTION: Final = ToolName()


class ResponseEvents:
    """Each method returns the events that it causes."""

    def __init__(
        self,
        response: Mapping[str, Any],
        names: Mapping[str, ToolName],
        *,
        logprobs: LogprobShapes | None = None,
        raw: RawMessages | None = None,
    ) -> None:
        """`response`: as it is at its start (`shapes.response_object`).

        `logprobs` None: text comes without them; `raw` None: nobody wants to see tokens.
        """
        self.server_calls: list[McpCallItem] = []
        """Calls of the turn that has ended, which the gateway is to make now."""
        self.finish_reason: str | None = None
        """Of the last turn."""
        self._response = dict(response)
        self._names = names
        self._shapes = logprobs
        self._raw = raw
        self._recorder = EventRecorder(response["id"])
        self._call_ids: set[str] = set()
        self._begin_turn()

    @property
    def response(self) -> dict[str, Any]:
        """The Response as it is now."""
        return {**self._response, "output": list(self._recorder.output)}

    def _begin_turn(self) -> None:
        self._open: OpenItem | None = None
        """Text or reasoning."""
        self._calling: OpenItem | None = None
        """Of a call that was broken off the end may come behind text, so it stays open."""
        self._blank: str = ""
        """Space that may turn out to be the beginning of text, or only stand before a call."""
        self._blank_logprobs: list[ChatLogprob] = []
        self._logprobs = ContentLogprobs(self._shapes) if self._shapes is not None else None
        self._first_item = len(self._recorder.output)

    def queue(self) -> list[Event]:
        """The response waits to be worked on."""
        return self._tell("created", status="queued") + self._tell("queued")

    def begin(self, *, is_created: bool = False) -> list[Event]:
        """Work begins; `is_created`: the response has been told of before."""
        created = [] if is_created else self._tell("created", status="in_progress")
        return created + self._tell("in_progress", status="in_progress")

    def write(self, pieces: Sequence[OutputChunk]) -> list[Event]:
        """What the model wrote."""
        if self._raw is not None:
            self._raw.write(pieces)
        for piece in pieces:
            stretches = iter(self._logprobs.push(piece) if self._logprobs is not None else ())
            for event in piece.all_events():
                if isinstance(event, Content):
                    self._content(event.text, next(stretches, []))
                elif isinstance(event, Reasoning):
                    self._reasoning(event.text)
                elif isinstance(event, CallBegin):
                    self._call(event)
                else:
                    self._arguments(event)
            if piece.finish_reason is not None:
                self.finish_reason = piece.finish_reason
        return self._recorder.take()

    def end_turn(self, packed_prompt: bytes = b"") -> list[Event]:
        """The model has ended. `server_calls` says whether the gateway has work to do."""
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
            # The response ends here: nobody would read what the tools answer.
            for call in self.server_calls:
                call.give_up()
            self.server_calls.clear()
        self._begin_turn()
        return self._recorder.take()

    def succeed(self, call: McpCallItem, output: str) -> list[Event]:
        """An MCP tool has answered."""
        self.server_calls.remove(call)
        call.succeed(output)
        return self._recorder.take()

    def fail_call(self, call: McpCallItem, error: dict[str, Any]) -> list[Event]:
        """An MCP tool could not be called, or says that it failed."""
        self.server_calls.remove(call)
        call.fail(error)
        return self._recorder.take()

    def begin_listing(self, server_label: str) -> tuple[McpListing, list[Event]]:
        """An MCP server is asked for its tools."""
        return McpListing(self._recorder, server_label), self._recorder.take()

    def end_listing(
        self, listing: McpListing, tools: list[dict[str, Any]], error: str | None = None
    ) -> list[Event]:
        """It has answered, or has not."""
        if error is None:
            listing.succeed(tools)
        else:
            listing.fail(error)
        return self._recorder.take()

    def complete(self, usage: dict[str, Any] | None, *, is_cut: bool = False) -> list[Event]:
        """All turns have ended; `is_cut`: no tokens are left for another one."""
        if self.finish_reason != "length" and not is_cut:
            return self._tell("completed", status="completed", usage=usage)
        details = {"reason": "max_output_tokens"}
        incomplete = {"status": "incomplete", "incomplete_details": details}
        return self._tell("incomplete", **incomplete, usage=usage)

    def fail(self, error: TokenMeshError, usage: dict[str, Any] | None = None) -> list[Event]:
        """It could not be completed. What there is of it stays."""
        self._give_up()
        facts = error_facts(error)
        self._recorder.emit("error", **facts, param=error.param)
        return self._tell("failed", status="failed", error=facts, usage=usage)

    def cancel(self, usage: dict[str, Any] | None = None) -> list[Event]:
        """Somebody wanted it to end. OpenAI has no event of that name."""
        self._give_up()
        return self._tell("incomplete", status="cancelled", usage=usage)

    def _give_up(self) -> None:
        self._close("incomplete")
        for call in self.server_calls:
            call.fail({"type": "mcp_tool_execution_error", "content": "the call was given up"})
        self.server_calls.clear()

    def _tell(self, kind: str, **fields: Any) -> list[Event]:
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
        name = self._names.get(begin.name, _FUNCTION)
        if name.kind == "mcp":
            self._calling = McpCallItem(self._recorder, name)
            return
        call_id = begin.model_id
        if call_id is None or call_id in self._call_ids:
            call_id = self._recorder.make_id("call")
        self._call_ids.add(call_id)
        kind = OpenCustomCall if name.kind == "custom" else OpenFunctionCall
        self._calling = kind(self._recorder, begin.name, call_id)

    def _arguments(self, event: CallArguments) -> None:
        assert self._calling is not None, "arguments without a call"
        self._calling.write(event.text)

    def _close(self, status: Any) -> None:
        self._close_text(status)
        call, self._calling = self._calling, None
        if call is None:
            return
        call.close(status)
        if isinstance(call, McpCallItem) and status == "completed":
            self.server_calls.append(call)

    def _close_text(self, status: Any) -> None:
        self._blank, self._blank_logprobs = "", []
        item, self._open = self._open, None
        if item is not None:
            item.close(status)
