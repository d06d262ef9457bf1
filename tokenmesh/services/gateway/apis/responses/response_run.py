"""ResponseRun: generates one response, turn by turn, from the end of its log."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.conversations import Conversations
from tokenmesh.services.gateway.apis.responses.event_log import Replay, encode_frames
from tokenmesh.services.gateway.apis.responses.items import request_items
from tokenmesh.services.gateway.apis.responses.model_turn import Flush, job_of_turn, open_turn
from tokenmesh.services.gateway.apis.responses.output_items import Event
from tokenmesh.services.gateway.apis.responses.records import Flushed, ResponseEnded, Status
from tokenmesh.services.gateway.apis.responses.response_plan import ResponsePlan, prepare
from tokenmesh.services.gateway.apis.responses.shapes import usage_fields
from tokenmesh.services.gateway.core.generation.answer import GenerationServices
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Meter, Usage
from tokenmesh.services.gateway.core.http.sse import encode_json
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import Conflict, DeadlineExceeded, NotFound, TokenMeshError

logger = logging.getLogger(__name__)

_CLIENT_CALLS: Final = ("function_call", "custom_tool_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Parts of the gateway that every run uses."""

    builder: RequestBuilder
    services: GenerationServices
    conversations: Conversations | None = None


class ResponseRun:
    """One response; `run` is called once."""

    def __init__(
        self,
        plan: ResponsePlan,
        replay: Replay,
        context: RunContext,
        meter: Meter,
        *,
        is_marked: bool = False,
    ) -> None:
        """`is_marked`: another gateway adopts the response if this process dies."""
        self._spec = plan.spec
        self._first = plan.first
        self._events = plan.first.events
        self._tools = plan.tools
        self._replay = replay
        self._context = context
        self._meter = meter
        self._is_marked = is_marked
        self._usages: list[Usage] = []
        """Usage of the finished turns."""
        self._delivery: Delivery | None = None
        """The current turn."""
        self.failure: TokenMeshError | None = None
        """Why the response has failed."""
        self._is_cancelled = False
        self._is_ended = False
        self._task: asyncio.Task[Any] | None = None

    @property
    def has_events(self) -> bool:
        return self._replay.num_events > 0

    def release(self) -> None:
        """Release the lease of admission."""
        if self._spec.lease is not None:
            self._spec.lease.release()

    def cancel(self) -> None:
        """End the response as cancelled.

        If the task is cancelled instead, the response stays open and another gateway adopts it.
        """
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Return when the end is recorded.

        Raises Conflict if another gateway has taken the log over, and the error of a response
        that failed before its first event: such a response is not stored.
        """
        self._task = asyncio.current_task()
        try:
            async with asyncio.timeout(self._spec.deadline_s - now_s()):
                await self._generate()
        except TimeoutError:
            await self._fail(DeadlineExceeded("the response was not complete in time"))
        except asyncio.CancelledError:
            if not self._is_cancelled or self._task is None or self._task.uncancel():
                raise
            await self._end_cancelled()
        except Conflict:
            raise
        except TokenMeshError as error:
            await self._fail(error)

    async def _generate(self) -> None:
        generation = self._first.generation
        if self._spec.is_background:
            await self._replay.emit(self._events.queue())
        for number in count():
            if await self._run_turn(number, generation):
                return
            await self._tools.make_calls(self._replay, self._events)
            if self._has_no_next_turn():
                await self._complete([])
                return
            generation = await self._next_turn()

    async def _run_turn(self, number: int, generation: GenerationRequest) -> bool:
        """Returns whether the response has ended."""
        spec, context, first_job = self._spec, self._context, generation.jobs[0]
        seed = spec.seed if spec.seed is not None else first_job.sampling.seed
        job = job_of_turn(first_job, number, seed, spec.deadline_s)
        async with open_turn(number, generation, job, self._replay, context.services) as (
            turn,
            recorded,
        ):
            self._delivery = turn.delivery
            if number == 0:
                (prompt,) = turn.delivery.prompts
                texts = prompt.warning_texts((), self._first.translation.fields.rename)
                # Before the first event, with which the headers of a stream leave.
                spec.context.warnings.extend(texts)
                await self._replay.emit(self._events.begin(is_created=spec.is_background))
                await self._tools.emit_listings(self._replay, self._events)
            async with aclosing(turn.flushes(recorded)) as flushes:
                async for flush in flushes:
                    if await self._handle(flush, turn.delivery):
                        return True
        return False

    async def _handle(self, flush: Flush, delivery: Delivery) -> bool:
        """Record the events of a flush; returns whether the response has ended."""
        if flush.recorded is None:
            self._meter.flush(delivery.prompts)
        events = self._events.write(flush.chunks)
        if delivery.is_complete:
            events += self._end_turn(delivery)
            if not self._events.server_calls or self._has_no_next_turn():
                self._meter.finish(delivery.prompts, delivery.choices)
            if not self._events.server_calls:
                await self._complete(events, flush)
                return True
        if flush.recorded is not None:
            self._replay.check(flush.recorded, events)
        else:
            frames = encode_frames(events)
            await self._replay.record(Flushed(portions=flush.portions, frames=frames))
        return False

    def _end_turn(self, delivery: Delivery) -> list[Event]:
        self._usages.append(delivery.usage())
        self._delivery = None
        return self._events.end_turn(delivery.prompts[0].packed_ids)

    async def _complete(self, events: list[Event], flush: Flush | None = None) -> None:
        # Without a flush the response ends after MCP calls: if the client has no calls to
        # execute, no tokens are left for another turn.
        is_out_of_tokens = flush is None and not self._awaits_client()
        is_cut = is_out_of_tokens or self._events.finish_reason == "length"
        status: Status = "incomplete" if is_cut else "completed"
        events += self._events.complete(self._usage(), is_cut=is_cut)
        await self._end(status, events, flush)

    def _has_no_next_turn(self) -> bool:
        """Return whether the response ends although MCP tools were called."""
        return self._awaits_client() or self._tokens_left() == 0

    def _tokens_left(self) -> int | None:
        """Rest of max_output_tokens, which limits all turns together; None: no limit."""
        limit = self._spec.body.max_output_tokens
        if limit is None:
            return None
        return max(0, limit - sum(each.completion_tokens for each in self._usages))

    def _awaits_client(self) -> bool:
        """Return whether the client has calls to execute before the next turn."""
        return any(each["type"] in _CLIENT_CALLS for each in self._events.response["output"])

    async def _next_turn(self) -> GenerationRequest:
        """The generation that continues with the results of the calls."""
        spec = self._spec
        items = [*spec.body.items, *self._events.response["output"]]
        update = {"input": items, "max_output_tokens": self._tokens_left()}
        prepared = await prepare(
            self._context.builder,
            spec.body.model_copy(update=update),
            spec.context,
            spec.id,
            previous=spec.previous,
            served=self._tools.served,
        )
        return prepared.generation

    async def _end_cancelled(self) -> None:
        if self._is_ended:
            await self._close()
        else:
            await self._end("cancelled", self._events.cancel(self._usage()))

    async def _fail(self, error: TokenMeshError) -> None:
        if self._is_ended:
            raise error
        error = self._first.translation.fields.rename(error)
        if not self.has_events:
            raise error
        logger.info("response %s fails: %s", self._spec.id, error.message)
        self.failure = error
        await self._end("failed", self._events.fail(error, self._usage()))

    async def _end(
        self, status: Status, events: Sequence[Event], flush: Flush | None = None
    ) -> None:
        if status in ("completed", "incomplete"):
            await self._add_to_conversation()
        self._is_ended = True
        ended = ResponseEnded(
            status=status,
            response=encode_json(self._events.response),
            portions=flush.portions if flush is not None else [],
            frames=encode_frames(events),
        )
        await self._replay.record(ended)
        await self._close()

    async def _add_to_conversation(self) -> None:
        """Before the client sees the end: its next request must find the items.

        One that was deleted meanwhile stays deleted.
        """
        spec, conversations = self._spec, self._context.conversations
        if spec.body.conversation_id is None or conversations is None:
            return
        items = [*request_items(spec.body, spec.id), *self._events.response["output"]]
        with suppress(NotFound):
            access = spec.context.access
            await conversations.add_response(spec.body.conversation_id, access, items)

    async def _close(self) -> None:
        """The gateway that records the end charges all turns, including replayed ones."""
        await self._replay.settle()
        self.charge()

    def charge(self) -> None:
        """Charge the usage so far. A marked response is charged once for its id."""
        tenant, model = self._spec.context.access.tenant, self._first.generation.head.model
        name = self._spec.id if self._is_marked else ""
        self._context.services.admission.charge(tenant, model, self._all_usages(), name)

    def _all_usages(self) -> list[Usage]:
        """Usage of all turns including the current one."""
        running = [self._delivery.usage()] if self._delivery is not None else []
        return [*self._usages, *running]

    def _usage(self) -> Json:
        return usage_fields(self._all_usages())
