"""RealtimeResponse: one answer of a session, from response.created to response.done."""

import asyncio
from collections import deque
from typing import Any

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.generation.delivery import Delivery, deliver
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.openai.field_places import Places
from tokenmesh.services.gateway.openai.shapes import Usage
from tokenmesh.services.gateway.realtime.channel import Channel
from tokenmesh.services.gateway.realtime.output import ResponseOutput
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.telemetry import REQUEST_ID, span

Json = dict[str, Any]


class RealtimeResponse:
    """Runs an Ask and tells of it in events."""

    def __init__(
        self,
        ask: GenerationRequest,
        gateway: Gateway,
        channel: Channel,
        output: ResponseOutput,
        places: Places,
        facts: Json,
        exchange: RequestContext,
    ) -> None:
        """`facts`: what the client is shown of the response besides how it goes."""
        self._ask = ask
        self._gateway = gateway
        self._channel = channel
        self._output = output
        self._places = places
        self._facts = facts
        self._meter = gateway.meters.start(ask.head.model, exchange.started_s)
        self._exchange = exchange
        self._delivery: Delivery | None = None
        self._unsent: deque[Json] = deque()
        """A cancellation that meets a slow client must not tear a hole into the events."""
        self._is_generating = True
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Also the request's id, under which its trace is found."""
        return self._ask.head.id

    @property
    def is_active(self) -> bool:
        """Whether response.done is still to come."""
        return self._task is not None and not self._task.done()

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Begin, in a task that ends with Cancelled when the client is gone.

        The lease of the exchange is released with the task.
        """
        await self._tell("response.created", "in_progress")
        self._task = group.create_task(self._run())
        self._task.add_done_callback(lambda _: self._exchange.release())
        # A task that is cancelled before its first step never takes one.
        await asyncio.sleep(0)

    async def done(self) -> None:
        """Return after response.done."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def cancel(self) -> None:
        """As the client wants: what there is stays, as incomplete. Too late, it is complete."""
        if self._task is not None and self._is_generating and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def _run(self) -> None:
        attributes = {REQUEST_ID: self.id, "tokenmesh.model": self._ask.head.model}
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
                await self._end("failed", {"error": _error_view(self._places.rename(error))})
            else:
                is_cut = reason == "length"
                details = {"reason": "max_output_tokens"} if is_cut else {}
                await self._end("incomplete" if is_cut else "completed", details)

    async def _generate(self) -> str | None:
        """Why the model stopped."""
        gateway, ask = self._gateway, self._ask
        limit, admission = gateway.settings.max_buffered_tokens, gateway.admission
        reason: str | None = None
        async with deliver(
            gateway.pipeline, ask.jobs, ask.make_choices, limit, admission
        ) as delivery:
            self._delivery = delivery
            async for pieces in delivery.pieces():
                self._meter.flush(delivery)
                # All are counted already: a cancellation between two of them must lose none.
                for piece in pieces:
                    reason = piece.finish_reason
                    self._unsent.extend(self._output.push(piece.all_events()))
                await self._channel.send_all(self._unsent)
            self._meter.finish(delivery, ask.jobs[0].n)
        self._is_generating = False
        return reason

    async def _end(self, status: str, details: Json) -> None:
        is_whole = status == "completed"
        self._unsent.extend(self._output.finish("completed" if is_whole else "incomplete"))
        await self._channel.send_all(self._unsent)
        await self._tell("response.done", status, {"type": status, **details})

    async def _tell(self, kind: str, status: str, details: Json | None = None) -> None:
        usage = None if self._delivery is None else _usage_view(self._delivery.usage())
        response = {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": [item.view for item in self._output.items],
            "output_modalities": ["text"],
            "usage": usage,
            **self._facts,
        }
        await self._channel.send({"type": kind, "response": response})


def _error_view(error: TokenMeshError) -> Json:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"type": kind, "code": error.code, "message": error.message}


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
