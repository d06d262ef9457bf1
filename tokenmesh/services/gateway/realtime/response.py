"""RealtimeResponse: one response of a session, from response.created to response.done."""

import asyncio
from collections import deque

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.delivery import Delivery, deliver
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.generation.usage import Usage
from tokenmesh.services.gateway.openai.field_names import FieldNames
from tokenmesh.services.gateway.openai.translation import Json
from tokenmesh.services.gateway.realtime.channel import Channel, error_view
from tokenmesh.services.gateway.realtime.output import ResponseOutput
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, span


class RealtimeResponse:
    """Runs a generation and reports it in events."""

    def __init__(
        self,
        generation: GenerationRequest,
        gateway: Gateway,
        channel: Channel,
        output: ResponseOutput,
        names: FieldNames,
        fields: Json,
        context: RequestContext,
    ) -> None:
        """`fields`: fields of the response that do not change while it runs."""
        self._generation = generation
        self._gateway = gateway
        self._channel = channel
        self._output = output
        self._names = names
        self._fields = fields
        self._meter = gateway.meters.start(generation.head.model, context.started_s)
        self._context = context
        self._delivery: Delivery | None = None
        self._unsent: deque[Json] = deque()
        """Events that a cancelled task had not sent yet: none may be skipped."""
        self._is_generating = True
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Also the request's id, under which its trace is found."""
        return self._generation.head.id

    @property
    def is_active(self) -> bool:
        """Whether response.done has not been sent yet."""
        return self._task is not None and not self._task.done()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` has ended it, or is about to."""
        return self._is_cancelled

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Begin, in a task that raises Cancelled when the client has disconnected.

        The lease of the context is released when the task ends.
        """
        await self._send("response.created", "in_progress")
        self._task = group.create_task(self._run())
        self._task.add_done_callback(lambda _: self._context.release())
        # A task that is cancelled before its first step would not run at all.
        await asyncio.sleep(0)

    async def done(self) -> None:
        if self._task is not None:
            await asyncio.wait((self._task,))

    def cancel(self) -> None:
        """End the response as incomplete. No effect once generation has finished."""
        if self._task is not None and self._is_generating and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def _run(self) -> None:
        attributes = {REQUEST_ID: self.id, "tokenmesh.model": self._generation.head.model}
        with span("realtime_response", attributes):
            try:
                reason = await self._generate()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._is_cancelled or task is None or task.uncancel():
                    raise
                await self._end("cancelled", {"reason": "client_cancelled"})
            except Cancelled:
                raise
            except TokenMeshError as error:
                self._is_generating = False
                await self._end("failed", {"error": error_view(self._names.rename(error))})
            else:
                is_cut = reason == "length"
                details = {"reason": "max_output_tokens"} if is_cut else {}
                await self._end("incomplete" if is_cut else "completed", details)

    async def _generate(self) -> str | None:
        """Returns the finish reason."""
        gateway, generation = self._gateway, self._generation
        limit = gateway.settings.max_buffered_tokens
        reason: str | None = None
        async with deliver(gateway.pipeline, generation, limit, gateway.admission) as delivery:
            self._delivery = delivery
            async for pieces in delivery.chunks():
                self._meter.flush(delivery.prompts)
                # All chunks are counted in the usage, so a cancellation must not drop any.
                for chunk in pieces:
                    reason = chunk.finish_reason
                    self._unsent.extend(self._output.push(chunk.all_events()))
                await self._channel.send_all(self._unsent)
            self._meter.finish(delivery.prompts, delivery.choices)
        self._is_generating = False
        return reason

    async def _end(self, status: str, details: Json) -> None:
        is_whole = status == "completed"
        self._unsent.extend(self._output.finish("completed" if is_whole else "incomplete"))
        await self._channel.send_all(self._unsent)
        await self._send("response.done", status, {"type": status, **details})

    async def _send(self, kind: str, status: str, details: Json | None = None) -> None:
        usage = None if self._delivery is None else _usage_view(self._delivery.usage())
        response = {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [item.view for item in self._output.items],
            "output_modalities": ["text"],
            "usage": usage,
            **self._fields,
        }
        await self._channel.send({"type": kind, "response": response})


def _usage_view(usage: Usage) -> Json:
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens
    return {
        "total_tokens": usage.total_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens,
            "audio_tokens": 0,
            "cached_tokens": cached,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }
