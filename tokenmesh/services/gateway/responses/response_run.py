"""ResponseRun: makes one response, turn after turn, from wherever its history ends."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

from tokenmesh.services.gateway.generation.delivery import Delivery
from tokenmesh.services.gateway.generation.metering import Meter
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.sse import encode_json
from tokenmesh.services.gateway.mesh.pipeline import Pipeline
from tokenmesh.services.gateway.openai.intake import Intake
from tokenmesh.services.gateway.openai.shapes import Usage
from tokenmesh.services.gateway.responses.draft import PreparedResponse, draft
from tokenmesh.services.gateway.responses.job_of_turn import job_of_turn
from tokenmesh.services.gateway.responses.model_turn import Flush, open_turn
from tokenmesh.services.gateway.responses.recorder import Event
from tokenmesh.services.gateway.responses.records import Ended, Flushed, Status
from tokenmesh.services.gateway.responses.replay import Replay, encode_frames
from tokenmesh.services.gateway.responses.response_spec import ResponseSpec
from tokenmesh.services.gateway.responses.shapes import usage_fields
from tokenmesh.services.gateway.responses.tool_calls import ToolCalls
from tokenmesh.services.gateway.tenancy.admission import Admission
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import Conflict, DeadlineExceeded, TokenMeshError

logger = logging.getLogger(__name__)

_CLIENTS_TOOLS = ("function_call", "custom_tool_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What every run of a gateway needs."""

    intake: Intake
    pipeline: Pipeline
    max_buffered_tokens: int
    admission: Admission


class ResponseRun:
    """One response; `run` is called once."""

    def __init__(
        self,
        order: ResponseSpec,
        first: PreparedResponse,
        steps: Replay,
        tools: ToolCalls,
        means: RunContext,
        meter: Meter,
        *,
        is_marked: bool = False,
    ) -> None:
        """`is_marked`: should this process die, others look after the response."""
        self._order = order
        self._first = first
        self._events = first.events
        self._steps = steps
        self._tools = tools
        self._means = means
        self._meter = meter
        self._is_marked = is_marked
        self._usages: list[Usage] = []
        self._delivery: Delivery | None = None
        self.failure: TokenMeshError | None = None
        """Why the response has ended as failed."""
        self._is_cancelled = False
        self._is_ended = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def has_told(self) -> bool:
        """Whether there is any event."""
        return self._steps.num_told > 0

    def release(self) -> None:
        """Somebody else of its tenant may begin."""
        if self._order.lease is not None:
            self._order.lease.release()

    def cancel(self) -> None:
        """Somebody wants it to end here. Cancelling the task instead leaves it to be continued."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Return when the end is recorded.

        Raises Conflict when the log is another's, and what came up before a client that waits
        was told anything: nothing of such a response is worth keeping.
        """
        self._task = asyncio.current_task()
        try:
            async with asyncio.timeout(self._order.deadline_s - now_s()):
                await self._work()
        except TimeoutError:
            await self._fail(DeadlineExceeded("the response was not complete in time"))
        except asyncio.CancelledError:
            if not self._is_cancelled or self._task is None or self._task.uncancel():
                raise
            await self._cancel()
        except Conflict:
            raise
        except TokenMeshError as error:
            await self._fail(error)

    async def _work(self) -> None:
        order, ask = self._order, self._first.ask
        if order.is_background:
            await self._steps.tell(self._events.queue())
        for number in count():
            if await self._turn(number, ask):
                return
            await self._tools.make_calls(self._steps, self._events)
            if self._ends_here():
                await self._complete([])
                return
            ask = await self._next_ask()

    async def _turn(self, number: int, ask: GenerationRequest) -> bool:
        """Whether it was the last one."""
        seed = self._order.seed if self._order.seed is not None else ask.jobs[0].sampling.seed
        job = job_of_turn(ask.jobs[0], number, seed, self._order.deadline_s)
        limit, pipeline = self._means.max_buffered_tokens, self._means.pipeline
        async with open_turn(number, ask, job, self._steps, pipeline, limit) as (turn, recorded):
            self._delivery = turn.delivery
            if number == 0:
                is_created = self._order.is_background
                await self._steps.tell(self._events.begin(is_created=is_created))
                await self._tools.tell_listings(self._steps, self._events)
            async with aclosing(turn.flushes(recorded)) as flushes:
                async for flush in flushes:
                    if await self._take(flush, turn.delivery):
                        return True
        return False

    async def _take(self, flush: Flush, delivery: Delivery) -> bool:
        """Tell what came; whether that was the end of the response."""
        if flush.recorded is None:
            self._meter.flush(delivery)
        events = self._events.write(flush.pieces)
        if delivery.is_complete:
            events += self._end_turn(delivery)
            if not self._events.server_calls or self._ends_here():
                self._meter.finish(delivery, 1)
            if not self._events.server_calls:
                await self._complete(events, flush)
                return True
        if flush.recorded is not None:
            self._steps.retell(flush.recorded, events)
        else:
            await self._steps.record(Flushed(portions=flush.portions, frames=encode_frames(events)))
        return False

    def _end_turn(self, delivery: Delivery) -> list[Event]:
        self._usages.append(delivery.usage())
        self._delivery = None
        return self._events.end_turn(delivery.prompts[0].packed_ids)

    async def _complete(self, events: list[Event], flush: Flush | None = None) -> None:
        # Behind calls of servers: for want of tokens, if it is not for the client's answers.
        is_out = flush is None and not self._awaits_client()
        is_cut = is_out or self._events.finish_reason == "length"
        status: Status = "incomplete" if is_cut else "completed"
        events += self._events.complete(self._usage(), is_cut=is_cut)
        await self._end(status, events, flush)

    def _ends_here(self) -> bool:
        """Whether there is no further turn although servers were called."""
        return self._awaits_client() or self._tokens_left() == 0

    def _tokens_left(self) -> int | None:
        """Of max_output_tokens, which bounds all turns together; None: as many as there is room."""
        limit = self._order.body.max_output_tokens
        if limit is None:
            return None
        return max(0, limit - sum(each.completion_tokens for each in self._usages))

    def _awaits_client(self) -> bool:
        """Whether the client has calls to make before the model can go on."""
        return any(each["type"] in _CLIENTS_TOOLS for each in self._events.response["output"])

    async def _next_ask(self) -> GenerationRequest:
        """What the model is asked when it gets to see what its calls brought."""
        order = self._order
        items = [*order.body.items, *self._events.response["output"]]
        left = self._tokens_left()
        body = order.body.model_copy(update={"input": items, "max_output_tokens": left})
        made = await draft(
            self._means.intake,
            body,
            order.exchange,
            order.id,
            previous=order.previous,
            served=self._tools.served,
        )
        return made.ask

    async def _cancel(self) -> None:
        if self._is_ended:
            await self._close()
        else:
            await self._end("cancelled", self._events.cancel(self._usage()))

    async def _fail(self, error: TokenMeshError) -> None:
        if self._is_ended:
            raise error
        error = self._first.translation.places.rename(error)
        if not self.has_told:
            raise error
        logger.info("%s fails: %s", self._order.id, error.message)
        self.failure = error
        await self._end("failed", self._events.fail(error, self._usage()))

    async def _end(
        self, status: Status, events: Sequence[Event], flush: Flush | None = None
    ) -> None:
        self._is_ended = True
        ended = Ended(
            status=status,
            response=encode_json(self._events.response),
            portions=flush.portions if flush is not None else [],
            frames=encode_frames(events),
        )
        await self._steps.record(ended)
        await self._close()

    async def _close(self) -> None:
        """Whoever has recorded the end charges all of it, also what another had begun."""
        await self._steps.settle()
        self.charge()

    def charge(self) -> None:
        """What was generated until now. A response that has a mark is charged once by its id."""
        tenant, model = self._order.exchange.access.tenant, self._first.ask.head.model
        name = self._order.id if self._is_marked else ""
        self._means.admission.charge(tenant, model, self._all_usages(), name)

    def _all_usages(self) -> list[Usage]:
        """Of all turns, the one that runs among them."""
        running = [self._delivery.usage()] if self._delivery is not None else []
        return [*self._usages, *running]

    def _usage(self) -> dict[str, Any]:
        return usage_fields(self._all_usages())
