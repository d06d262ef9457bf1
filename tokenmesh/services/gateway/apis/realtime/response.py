"""RealtimeResponse: one response of a session, from response.created to response.done.

ResponseOutput makes its items of the model's output, and the server events that report them.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tokenmesh.services.gateway.apis.openai.translation import FieldNames, Json
from tokenmesh.services.gateway.apis.realtime.conversation import Item, RealtimeConversation
from tokenmesh.services.gateway.apis.realtime.errors import error_view
from tokenmesh.services.gateway.apis.realtime.events import Channel
from tokenmesh.services.gateway.apis.realtime.services import RealtimeServices
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.delivery import Delivery, deliver
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.generation.usage import Usage
from tokenmesh.services.gateway.parsers.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from tokenmesh.shared.errors import Cancelled, TokenMeshError
from tokenmesh.shared.ids import new_request_id
from tokenmesh.shared.telemetry import REQUEST_ID, span

_ITEM: Final = {"object": "realtime.item", "status": "in_progress"}


class ResponseOutput:
    """Items of one response in order. Reasoning is omitted: the API has no event for it."""

    def __init__(self, response_id: str, conversation: RealtimeConversation | None) -> None:
        """`conversation`: receives the items, unless None."""
        self.items: list[Item] = []
        self._response_id = response_id
        self._conversation = conversation
        self._previous_id: str | None = None
        self._text: list[str] = []
        self._blank = ""
        self._is_open = False

    def push(self, events: Iterable[Event]) -> Iterator[Json]:
        """Server events for parser events."""
        for event in events:
            if isinstance(event, Content):
                yield from self._push_text(event.text)
            elif isinstance(event, CallBegin):
                yield from self._begin_call(event)
            elif isinstance(event, CallArguments):
                self._text.append(event.text)
                call_id = self.items[-1].view["call_id"]
                yield self._event(
                    "function_call_arguments.delta", call_id=call_id, delta=event.text
                )

    def finish(self, status: str) -> Iterator[Json]:
        """The end of the open item; `status` is `completed` or `incomplete`."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._text)
        if item.view["type"] == "message":
            yield self._event("output_text.done", content_index=0, text=text)
            part = {"type": "text", "text": text}
            yield self._event("content_part.done", content_index=0, part=part)
            content = [{"type": "output_text", "text": text}]
            item.change(status=status, content=content)
        else:
            view = item.view
            yield self._event(
                "function_call_arguments.done",
                call_id=view["call_id"],
                name=view["name"],
                arguments=text,
            )
            item.change(status=status, arguments=text)
        yield self._item_event("output_item.done", item)
        yield from self._conversation_event("done", item)

    def _push_text(self, text: str) -> Iterator[Json]:
        """White space alone, as between calls, does not begin a message."""
        is_open = self._is_open and self.items[-1].view["type"] == "message"
        if not is_open:
            self._blank += text
            if not text.strip():
                return
            text, self._blank = self._blank, ""
            yield from self._begin_message()
        self._text.append(text)
        yield self._event("output_text.delta", content_index=0, delta=text)

    def _begin_message(self) -> Iterator[Json]:
        yield from self._begin({"type": "message", "role": "assistant", "content": []})
        part = {"type": "text", "text": ""}
        yield self._event("content_part.added", content_index=0, part=part)

    def _begin_call(self, event: CallBegin) -> Iterator[Json]:
        self._blank = ""
        call_id = event.model_id or new_request_id("call")
        call = {"type": "function_call", "name": event.name, "call_id": call_id, "arguments": ""}
        yield from self._begin(call)

    def _begin(self, fields: Json) -> Iterator[Json]:
        yield from self.finish("completed")
        item = Item({"id": new_request_id("item"), **_ITEM, **fields})
        self.items.append(item)
        self._text, self._is_open = [], True
        if self._conversation is not None:
            self._previous_id = self._conversation.append(item)
        yield self._item_event("output_item.added", item)
        yield from self._conversation_event("added", item)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {
            "type": f"response.{kind}",
            "response_id": self._response_id,
            "item_id": self.items[-1].id,
            "output_index": len(self.items) - 1,
            **fields,
        }

    def _item_event(self, kind: str, item: Item) -> Json:
        return {
            "type": f"response.{kind}",
            "response_id": self._response_id,
            "output_index": len(self.items) - 1,
            "item": item.view,
        }

    def _conversation_event(self, kind: str, item: Item) -> Iterator[Json]:
        if self._conversation is not None:
            yield {
                "type": f"conversation.item.{kind}",
                "previous_item_id": self._previous_id,
                "item": item.view,
            }


class RealtimeResponse:
    """Runs a generation and reports it in events."""

    def __init__(
        self,
        generation: GenerationRequest,
        services: RealtimeServices,
        channel: Channel,
        output: ResponseOutput,
        names: FieldNames,
        fields: Json,
        context: RequestContext,
    ) -> None:
        """`fields`: fields of the response that do not change while it runs."""
        self._generation = generation
        self._services = services
        self._channel = channel
        self._output = output
        self._names = names
        self._fields = fields
        self._meter = services.core.generation.meters.start(generation.head.model, context)
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
        """Return whether response.done has not been sent yet."""
        return self._task is not None and not self._task.done()

    @property
    def is_cancelled(self) -> bool:
        """Return whether `cancel` has ended it, or is about to."""
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
        services, generation = self._services, self._generation
        limit = services.core.settings.max_buffered_tokens
        reason: str | None = None
        async with deliver(
            services.core.mesh.pipeline, generation, limit, services.core.tenancy.admission
        ) as delivery:
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
    audio = 0 if details is None else details.audio_tokens
    images = 0 if details is None else details.image_tokens
    return {
        "total_tokens": usage.total_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - audio - images,
            "audio_tokens": audio,
            "image_tokens": images,
            "cached_tokens": cached,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }
