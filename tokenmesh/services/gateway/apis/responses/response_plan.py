"""ResponsePlan: all that is needed to run a response, from its request or from its log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.response_parts import LogprobShapes
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.event_log import EventLog, Replay, encode_frames
from tokenmesh.services.gateway.apis.responses.events import ResponseEvents
from tokenmesh.services.gateway.apis.responses.mcp_servers import (
    McpServers,
    RequestedServer,
    read_servers,
)
from tokenmesh.services.gateway.apis.responses.output_items import Event, McpCallItem
from tokenmesh.services.gateway.apis.responses.raw_messages import RawMessages
from tokenmesh.services.gateway.apis.responses.records import CallBegun, CallEnded, ToolsListed
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.shapes import response_object
from tokenmesh.services.gateway.apis.responses.tools import Listings, ServerTool, server_tools
from tokenmesh.services.gateway.apis.responses.translation import (
    ResponsesTranslation,
    is_long,
    translate,
)
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.tenancy.tenant import Lease
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.ids import ResponseId

_LOST: Final = "the call was begun, and its result is not known"


class ToolCalls:
    """MCP calls of one response, each recorded in its log. `max_calls` limits all turns together.

    A call that a dead gateway had begun is not repeated, because it may have had an effect: the
    model sees it as failed.
    """

    def __init__(
        self,
        mcp_servers: McpServers,
        requested: Sequence[RequestedServer],
        listings: Listings,
        tools: Sequence[Json],
        max_calls: int,
    ) -> None:
        self.served = server_tools(requested, listings, tools)
        self._mcp_servers = mcp_servers
        self._requested = {each.label: each for each in requested}
        self._listings = listings
        self._calls_left = max_calls

    async def emit_listings(self, replay: Replay, events: ResponseEvents) -> None:
        """Add an item with the tools of each server."""
        for server in self._requested.values():
            tools = list(self._listings[server.place])
            emitted = events.list_tools(server.label, tools)
            recorded = replay.next(ToolsListed)
            if recorded is not None:
                replay.check(recorded, emitted)
            else:
                data, frames = msgspec.json.encode(tools), encode_frames(emitted)
                await replay.record(ToolsListed(place=server.place, tools=data, frames=frames))

    async def make_calls(self, replay: Replay, events: ResponseEvents) -> None:
        """Make the calls of the last turn in order."""
        for call in tuple(events.server_calls):
            is_begun = replay.next(CallBegun) is not None
            ended = replay.next(CallEnded)
            self._calls_left -= 1
            if ended is not None:
                replay.check(ended, _emit(events, call, ended))
                continue
            if is_begun:
                ended = CallEnded(item=call.id, error=_LOST)
            else:
                await replay.record(CallBegun(item=call.id))
                # The log must have the call before it can have an effect.
                await replay.settle()
                ended = await self._call(call)
            frames = encode_frames(_emit(events, call, ended))
            await replay.record(msgspec.structs.replace(ended, frames=frames))

    async def _call(self, call: McpCallItem) -> CallEnded:
        if self._calls_left < 0:
            return CallEnded(item=call.id, error="max_tool_calls of the response is exceeded")
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=Json)
        except msgspec.DecodeError as error:
            return CallEnded(item=call.id, error=f"the arguments are not a JSON object: {error}")
        server = self._requested[call.name.server_label]
        try:
            output = await self._mcp_servers.call(server, call.name.name, arguments)
        except TokenMeshError as error:
            return CallEnded(item=call.id, error=error.message)
        return CallEnded(item=call.id, output=output)


def _emit(events: ResponseEvents, call: McpCallItem, ended: CallEnded) -> list[Event]:
    if ended.error is None:
        return events.succeed(call, ended.output or "")
    error = {"type": "mcp_tool_execution_error", "content": ended.error}
    return events.fail_call(call, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """A response to be generated, the same for every gateway that continues it."""

    id: ResponseId
    body: ResponsesRequest
    body_json: bytes
    created_s: float
    deadline_s: float
    context: RequestContext
    lease: Lease | None = None
    """Released at the end; None for a response that another gateway has admitted."""
    previous: Sequence[Json] = ()
    """Items of earlier responses, or of the conversation."""
    seed: int | None = None
    """Set when the response is planned."""

    @property
    def is_background(self) -> bool:
        """Return whether it is generated independently of the client's connection."""
        return bool(self.body.background)


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A validated turn of a response. The first turn's `events` are those of the response."""

    generation: GenerationRequest
    translation: ResponsesTranslation
    response: Json
    events: ResponseEvents


async def prepare(
    builder: RequestBuilder,
    body: ResponsesRequest,
    context: RequestContext,
    response_id: str,
    *,
    created_s: float | None = None,
    previous: Sequence[Json] = (),
    served: Mapping[str, Sequence[ServerTool]] | None = None,
) -> PreparedResponse:
    """`previous` and `served` as for `translate`; `created_s` (Unix time) None: now.

    Raises InvalidInput that names the client's fields.
    """
    is_large = is_long(body, previous) or context.has_large_body
    translation = await off_loop(is_large, translate, body, previous, served)
    context.warnings.extend(translation.warnings)
    with translation.client_paths():
        generation = await build_chat(builder, translation.chat, context)
    response = response_object(body, generation, response_id, created_s)
    events = ResponseEvents(
        response,
        translation.names,
        logprobs=LogprobShapes.of(generation) if body.shows_logprobs else None,
        raw=RawMessages(generation.text.vocabulary) if body.enable_response_messages else None,
    )
    return PreparedResponse(generation, translation, response, events)


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A response that can be begun or continued."""

    spec: ResponseSpec
    first: PreparedResponse
    tools: ToolCalls


@dataclass(slots=True)
class Planner:
    """Plans the responses of one gateway."""

    builder: RequestBuilder
    servers: McpServers
    settings: ResponseSettings

    async def plan(self, spec: ResponseSpec, log: EventLog | None = None) -> ResponsePlan:
        """List the tools of MCP servers, unless the log has them, and validate the request."""
        body = spec.body
        tools = body.tools or ()
        requested = read_servers(tools, self.settings.mcp_servers)
        listings = await self._listings(requested, log)
        limit = self.settings.max_tool_calls
        if body.max_tool_calls is not None:
            limit = min(limit, body.max_tool_calls)
        calls = ToolCalls(self.servers, requested, listings, tools, limit)
        first = await prepare(
            self.builder,
            body,
            spec.context,
            spec.id,
            previous=spec.previous,
            served=calls.served,
            created_s=spec.created_s,
        )
        if spec.seed is None:
            spec = replace(spec, seed=first.generation.jobs[0].sampling.seed)
        return ResponsePlan(spec, first, calls)

    async def _listings(
        self, requested: Sequence[RequestedServer], log: EventLog | None
    ) -> Listings:
        records = log.records if log is not None else []
        listings: dict[str, list[Json]] = {
            each.place: msgspec.json.decode(each.tools)
            for each in records
            if isinstance(each, ToolsListed)
        }
        for server in requested:
            if server.place not in listings:
                listings[server.place] = await self.servers.list_tools(server)
        return listings
