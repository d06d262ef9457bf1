"""ResponseMaker: POST /v1/responses where there is more to it than one turn that is forgotten."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from starlette.responses import Response

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.responses.answers import (
    Follow,
    FramesAnswer,
    WholeAnswer,
    feed_then_log,
)
from tokenmesh.services.gateway.responses.chain import previous_items
from tokenmesh.services.gateway.responses.feed import Feed
from tokenmesh.services.gateway.responses.follow import follow
from tokenmesh.services.gateway.responses.logs import ResponseLogs
from tokenmesh.services.gateway.responses.references import (
    has_references,
    resolve_references,
)
from tokenmesh.services.gateway.responses.request import ResponsesRequest
from tokenmesh.services.gateway.responses.response_plan import Planner, ResponsePlan
from tokenmesh.services.gateway.responses.response_spec import ResponseSpec
from tokenmesh.services.gateway.responses.runs import Runs
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.clock import now_s, wall_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.responses import ResponseSettings
from tokenmesh.shared.errors import InvalidInput, Overloaded, PayloadTooLarge, Unavailable
from tokenmesh.shared.ids import ResponseId
from tokenmesh.shared.journal import StoreFull


class ResponseMaker:
    """`logs` None: this gateway keeps nothing."""

    def __init__(
        self,
        logs: ResponseLogs | None,
        runs: Runs,
        planner: Planner,
        limits: GatewaySettings,
        settings: ResponseSettings,
    ) -> None:
        self._logs = logs
        self._runs = runs
        self._planner = planner
        self._limits = limits
        self._settings = settings

    def resolve(self, body: ResponsesRequest) -> ResponsesRequest:
        """The request with `store` as it will be. Raises InvalidInput for what cannot be kept."""
        if self._logs is None and (body.store or body.background):
            name = "background" if body.background else "store"
            raise NotSupported(f"{name}: responses are not kept here", param=name)
        if body.background and body.store is False:
            raise InvalidInput("background can only be used when `store` is true", param="store")
        is_kept = body.store if body.store is not None else self._settings.store
        return body.model_copy(update={"store": bool(is_kept and self._logs is not None)})

    def makes(self, body: ResponsesRequest) -> bool:
        """Whether a resolved request needs any of this."""
        has_servers = any(tool.get("type") == "mcp" for tool in body.tools or ())
        refers = body.previous_response_id is not None or has_references(body)
        return bool(body.store or refers or has_servers)

    async def make(
        self,
        body: ResponsesRequest,
        response_id: ResponseId,
        exchange: RequestContext,
        *,
        may_forget: bool,
    ) -> Response:
        """Begin, and say how to answer. Raises what is wrong with the request.

        `may_forget`: the client did not ask for it to be kept, so that it is no error if it is not.
        """
        plan = await self._plan(body, response_id, exchange)
        # What is made outlives the request, so it has the lease from here on.
        lease = exchange.take_lease()
        try:
            plan = replace(plan, order=replace(plan.order, lease=lease))
            return await self._begin_and_answer(plan, may_forget=may_forget)
        except BaseException:
            if lease is not None:
                lease.release()
            raise

    async def recall(
        self, body: ResponsesRequest, access: Access
    ) -> tuple[ResponsesRequest, list[dict[str, object]]]:
        """The request without references, and what was said before it. Raises NotFound."""
        return (
            await resolve_references(self._logs, body, access),
            await self._previous(body, access),
        )

    async def _begin_and_answer(self, plan: ResponsePlan, *, may_forget: bool) -> Response:
        body, response_id = plan.order.body, plan.order.id
        if body.background:
            return await self._in_background(plan)
        feed, is_kept = await self._begin(plan, may_forget=may_forget)
        on_left = partial(self._runs.cancel, response_id)
        if not body.stream:
            feed.leave()
            return WholeAnswer(feed, self._limits, on_left)
        return self._stream(plan, feed, on_left, is_kept=is_kept)

    async def _plan(
        self, body: ResponsesRequest, response_id: ResponseId, exchange: RequestContext
    ) -> ResponsePlan:
        body, previous = await self.recall(body, exchange.access)
        timeout_s = self._limits.request_timeout_s
        if body.background:
            timeout_s = self._settings.background_timeout_s
        order = ResponseSpec(
            id=response_id,
            body=body,
            body_json=body.model_dump_json(exclude_unset=True, by_alias=True).encode(),
            created_s=wall_s(),
            deadline_s=now_s() + timeout_s,
            exchange=exchange,
            previous=previous,
        )
        return await self._planner.plan(order)

    async def _previous(self, body: ResponsesRequest, access: Access) -> list[dict[str, object]]:
        if body.previous_response_id is None:
            return []
        if self._logs is None:
            raise NotSupported(
                "previous_response_id: responses are not kept here", param="previous_response_id"
            )
        return await previous_items(self._logs, body.previous_response_id, access)

    async def _in_background(self, plan: ResponsePlan) -> Response:
        await self._check_store(plan.order)
        feed = await self._runs.begin(plan)
        if plan.order.body.stream:
            return self._stream(plan, feed, feed.leave, is_kept=True)
        feed.leave()
        return json_response(plan.first.response)

    async def _begin(self, plan: ResponsePlan, *, may_forget: bool) -> tuple[Feed, bool]:
        """The feed, and whether its frames can be read again from a log."""
        order = plan.order
        if not order.body.store:
            return self._runs.begin_unkept(plan), False
        try:
            await self._check_store(order)
            if not order.body.stream:
                return self._runs.begin_late(plan), False
            return await self._runs.begin(plan), True
        except (PayloadTooLarge, Unavailable) as error:
            is_ours = isinstance(error, Overloaded) and not isinstance(error, StoreFull)
            if not may_forget or is_ours:
                raise
            order.exchange.warnings.append(f"not stored: {error.message}")
            return self._runs.begin_unkept(plan), False

    async def _check_store(self, order: ResponseSpec) -> None:
        assert self._logs is not None, "what is not kept needs no store"
        await self._logs.journal.prepare()
        limit = self._logs.journal.max_entry_bytes // 2
        if len(order.body_json) > limit:
            raise PayloadTooLarge(
                f"a request that is stored may have {limit} bytes, this one has "
                f"{len(order.body_json)}: send store: false",
                param="store",
            )

    def _stream(
        self, plan: ResponsePlan, feed: Feed, on_left: Callable[[], None], *, is_kept: bool
    ) -> Response:
        from_log: Follow | None = None
        if is_kept and self._logs is not None:
            from_log = partial(follow, self._logs, plan.order.id)
        frames = feed_then_log(feed, from_log)
        return FramesAnswer(frames, self._limits, on_left)
