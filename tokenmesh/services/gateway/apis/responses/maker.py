"""ResponseMaker: POST /v1/responses for responses that are stored or may have several turns.

Before that it finds the stored items that a request refers to: earlier responses, and single items
by id.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.feed import (
    Feed,
    Follow,
    FramesResponse,
    WholeResponse,
    feed_then_log,
)
from tokenmesh.services.gateway.apis.responses.items import input_items, no_such_item
from tokenmesh.services.gateway.apis.responses.output_items import response_of_item
from tokenmesh.services.gateway.apis.responses.request import ResponsesRequest
from tokenmesh.services.gateway.apis.responses.response_logs import ResponseLogs
from tokenmesh.services.gateway.apis.responses.response_plan import (
    Planner,
    ResponsePlan,
    ResponseSpec,
)
from tokenmesh.services.gateway.apis.responses.runs import Runs
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import InvalidInput, NotFound, Overloaded, PayloadTooLarge, Unavailable
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.journal import StoreFull

MAX_CHAIN_BYTES: Final = 8 * 1024 * 1024
"""Size of all their items together."""

_PREVIOUS: Final = "previous_response_id"


async def previous_items(logs: ResponseLogs, previous_id: str | None, access: Access) -> list[Json]:
    """Input and output of all responses in the chain of `previous_response_id`, oldest first.

    Raises NotFound, InvalidInput for one that has not ended, PayloadTooLarge over the limits.
    """
    settings = logs.settings
    newest_first: list[list[Json]] = []
    num_bytes = 0
    while previous_id is not None:
        if len(newest_first) >= settings.max_chain:
            raise _chain_too_long(f"{settings.max_chain} responses")
        ends = await logs.ends(previous_id, access, _PREVIOUS)
        if ends.ended is None:
            raise invalid(_PREVIOUS, f"{previous_id!r} has not ended yet")
        num_bytes += len(ends.begun.body) + len(ends.ended.response)
        if num_bytes > MAX_CHAIN_BYTES:
            raise _chain_too_long(f"{MAX_CHAIN_BYTES} bytes")
        body = ends.begun.request()
        response = msgspec.json.decode(ends.ended.response, type=Json)
        newest_first.append([*body.items, *response["output"]])
        previous_id = body.previous_response_id
    return [item for items in reversed(newest_first) for item in items]


def _chain_too_long(limit: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"{_PREVIOUS} leads to more than {limit}", param=_PREVIOUS)


def has_references(body: ResponsesRequest) -> bool:
    """Return whether the input refers to stored items."""
    return any(_reference(item) is not None for item in body.items)


async def resolve_references(
    logs: ResponseLogs | None, body: ResponsesRequest, access: Access
) -> ResponsesRequest:
    """The request with references replaced by the items.

    Raises NotFound for items that are not stored, PayloadTooLarge for too many responses.
    """
    if logs is None or not has_references(body):
        return body
    found: dict[str, Mapping[str, Json]] = {}
    items = []
    for index, item in enumerate(body.items):
        item_id = _reference(item)
        if item_id is None:
            items.append(item)
            continue
        response_id = response_of_item(item_id)
        if response_id is not None and response_id not in found:
            if len(found) >= (limit := logs.settings.max_chain):
                text = f"input refers to more than {limit} responses"
                raise PayloadTooLarge(text, param="input")
            found[response_id] = await _items_of(logs, response_id, access)
        if response_id is None or item_id not in found[response_id]:
            raise no_such_item(item_id, f"input[{index}]")
        items.append(found[response_id][item_id])
    return body.model_copy(update={"input": items})


def _reference(item: Json) -> str | None:
    """The id that an item refers to; None if it is an item itself."""
    kind, item_id = item.get("type"), item.get("id")
    is_bare = kind is None and "role" not in item
    return item_id if isinstance(item_id, str) and (is_bare or kind == "item_reference") else None


async def _items_of(logs: ResponseLogs, response_id: str, access: Access) -> dict[str, Json]:
    """Items of a response by id; empty if it is not stored or has not ended."""
    try:
        ends = await logs.ends(response_id, access)
    except NotFound:
        return {}
    if ends.ended is None:
        return {}
    response = msgspec.json.decode(ends.ended.response, type=Json)
    return {item["id"]: item for item in (*input_items(ends.begun), *response["output"])}


@dataclass(slots=True)
class ResponseMaker:
    """`logs` None: this gateway stores no responses."""

    logs: ResponseLogs | None
    runs: Runs
    planner: Planner
    limits: GatewaySettings
    settings: ResponseSettings

    def resolve(self, body: ResponsesRequest) -> ResponsesRequest:
        """The request with `store` resolved. Raises InvalidInput if it cannot be stored."""
        if self.logs is None and (body.store or body.background):
            name = "background" if body.background else "store"
            raise invalid(name, "is not supported: this server stores no responses", NotSupported)
        if body.background and body.store is False:
            raise InvalidInput("background can only be used when `store` is true", param="store")
        if body.conversation is not None and (self.logs is None or body.store is False):
            problem = "this server stores no responses" if self.logs is None else "store is false"
            raise invalid("conversation", f"is not supported: {problem}", NotSupported)
        if body.conversation is not None:
            return body.model_copy(update={"store": True})
        is_stored = body.store if body.store is not None else self.settings.store
        return body.model_copy(update={"store": bool(is_stored and self.logs is not None)})

    def needs_run(self, body: ResponsesRequest) -> bool:
        """Return whether a request needs `make`: it is stored, has references or MCP tools."""
        has_servers = any(tool.get("type") == "mcp" for tool in body.tools or ())
        given = (body.previous_response_id, body.conversation)
        refers = any(each is not None for each in given) or has_references(body)
        return bool(body.store or refers or has_servers)

    async def make(
        self,
        body: ResponsesRequest,
        response_id: ResponseId,
        context: RequestContext,
        *,
        may_skip_storing: bool,
    ) -> Response:
        """Begin the response. Raises errors of the request.

        `may_skip_storing`: if it cannot be stored, that is a warning and not an error.
        """
        plan = await self._plan(body, response_id, context)
        # The response may outlive the request, so the run owns the lease.
        lease = context.take_lease()
        try:
            plan = replace(plan, spec=replace(plan.spec, lease=lease))
            return await self._begin_and_answer(plan, may_skip_storing=may_skip_storing)
        except BaseException:
            if lease is not None:
                lease.release()
            raise

    async def load_history(
        self, body: ResponsesRequest, access: Access
    ) -> tuple[ResponsesRequest, list[Json]]:
        """The request with references resolved, and the items before it. Raises NotFound."""
        return (
            await resolve_references(self.logs, body, access),
            await self._previous(body, access),
        )

    async def _begin_and_answer(self, plan: ResponsePlan, *, may_skip_storing: bool) -> Response:
        body, response_id = plan.spec.body, plan.spec.id
        if body.background:
            return await self._in_background(plan)
        feed, is_stored = await self._begin(plan, may_skip_storing=may_skip_storing)
        on_left = partial(self.runs.cancel, response_id)
        if not body.stream:
            feed.leave()
            return WholeResponse(feed, self.limits, on_left)
        return self._stream(plan, feed, on_left, is_stored=is_stored)

    async def _plan(
        self, body: ResponsesRequest, response_id: ResponseId, context: RequestContext
    ) -> ResponsePlan:
        body, previous = await self.load_history(body, context.access)
        timeout_s = self.limits.request_timeout_s
        if body.background:
            timeout_s = self.settings.background_timeout_s
        spec = ResponseSpec(
            id=response_id,
            body=body,
            body_json=body.model_dump_json(exclude_unset=True, by_alias=True).encode(),
            created_s=wall_s(),
            deadline_s=now_s() + timeout_s,
            context=context,
            previous=previous,
        )
        return await self.planner.plan(spec)

    async def _previous(self, body: ResponsesRequest, access: Access) -> list[Json]:
        conversation = body.conversation_id
        if conversation is not None and body.previous_response_id is not None:
            raise invalid("conversation", "cannot be combined with previous_response_id")
        if conversation is not None and self.logs is not None:
            return (await self.logs.conversations.get(conversation, access)).items
        if body.previous_response_id is None:
            return []
        if self.logs is None:
            raise invalid(
                "previous_response_id",
                "is not supported: this server stores no responses",
                NotSupported,
            )
        return await previous_items(self.logs, body.previous_response_id, access)

    async def _in_background(self, plan: ResponsePlan) -> Response:
        await self._check_store(plan.spec)
        feed = await self.runs.begin(plan)
        if plan.spec.body.stream:
            return self._stream(plan, feed, feed.leave, is_stored=True)
        feed.leave()
        return Response(encode_json(plan.first.response), media_type="application/json")

    async def _begin(self, plan: ResponsePlan, *, may_skip_storing: bool) -> tuple[Feed, bool]:
        """The feed, and whether its frames are also in a log."""
        spec = plan.spec
        if not spec.body.store:
            return self.runs.begin_unstored(plan), False
        try:
            await self._check_store(spec)
            if not spec.body.stream and spec.body.conversation is None:
                return self.runs.begin_late(plan), False
            return await self.runs.begin(plan), True
        except (PayloadTooLarge, Unavailable) as error:
            is_busy = isinstance(error, Overloaded) and not isinstance(error, StoreFull)
            if not may_skip_storing or is_busy or spec.body.conversation is not None:
                raise
            spec.context.warnings.append(f"not stored: {error.message}")
            return self.runs.begin_unstored(plan), False

    async def _check_store(self, spec: ResponseSpec) -> None:
        assert self.logs is not None, "checked in `resolve`"
        await self.logs.journal.prepare()
        limit = self.logs.journal.max_entry_bytes // 2
        if len(spec.body_json) > limit:
            raise PayloadTooLarge(
                f"a stored request may have {limit} bytes (half of responses.max_record_bytes), "
                f"this one has {len(spec.body_json)}: send store: false",
                param="store",
            )

    def _stream(
        self, plan: ResponsePlan, feed: Feed, on_left: Callable[[], None], *, is_stored: bool
    ) -> Response:
        from_log: Follow | None = None
        if is_stored and self.logs is not None:
            from_log = partial(self.logs.follow, plan.spec.id)
        frames = feed_then_log(feed, from_log)
        return FramesResponse(frames, self.limits, on_left)
