"""RealtimeSession: one client's websocket, from session.created to its end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.realtime import events
from tokenmesh.services.gateway.apis.realtime.conversation import (
    Item,
    RealtimeConversation,
    read_item,
    reference_id,
)
from tokenmesh.services.gateway.apis.realtime.errors import (
    NoActiveResponse,
    ResponseActive,
    SessionOver,
)
from tokenmesh.services.gateway.apis.realtime.events import Channel
from tokenmesh.services.gateway.apis.realtime.response import RealtimeResponse, ResponseOutput
from tokenmesh.services.gateway.apis.realtime.services import RealtimeServices
from tokenmesh.services.gateway.apis.realtime.session_config import SessionConfig, translate
from tokenmesh.services.gateway.apis.realtime.speech_input import SpeechInput
from tokenmesh.services.gateway.apis.realtime.vllm_dialect import (
    VllmCommit,
    VllmEvents,
    VllmUpdate,
    begins_dialect,
    read_vllm_event,
    transcribing,
)
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.shared.clock import monotonic_s, wall_s
from tokenmesh.shared.errors import (
    Cancelled,
    Draining,
    InvalidInput,
    NotFound,
    TokenMeshError,
)
from tokenmesh.shared.ids import RequestId, new_request_id

logger = logging.getLogger(__name__)

_NORMAL = 1000
RESTARTS = 1012
"""Close codes. After the second the client can open a new session at once."""


class RealtimeSession:
    """Handles events one at a time, while at most one response is generated."""

    def __init__(
        self,
        session_id: str,
        config: SessionConfig,
        services: RealtimeServices,
        channel: Channel,
        access: Access,
    ) -> None:
        self._id = session_id
        self._config = config
        self._services = services
        self._settings = services.core.settings
        self._channel = channel
        self._access = access
        self._conversation = RealtimeConversation(self._settings)
        self._conversation_id = new_request_id("conv")
        self._response: RealtimeResponse | None = None
        self._lock = asyncio.Lock()  # held while an event is handled, or speech is answered
        self._speech = SpeechInput(
            services, channel, self._conversation, access, config, self._interrupt, self._answer
        )
        self._group = asyncio.TaskGroup()
        self._ends_s = monotonic_s() + self._settings.realtime_session_timeout_s
        self._expires_at_s = int(wall_s() + self._settings.realtime_session_timeout_s)
        self._active_s = monotonic_s()
        self._has_events = False
        self._handlers: dict[type[events.ClientEvent], Callable[[Any], Awaitable[None]]] = {
            events.SessionUpdate: self._update,
            events.ItemCreate: self._create_item,
            events.ItemRetrieve: self._retrieve_item,
            events.ItemDelete: self._delete_item,
            events.ItemTruncate: self._truncate_item,
            events.ResponseCreate: self._respond,
            events.ResponseCancel: self._cancel_response,
            events.AudioAppend: self._append,
            events.AudioCommit: lambda _: self._speech.commit(),
            events.AudioClear: lambda _: self._speech.clear(),
            VllmUpdate: self._choose_model,
            VllmCommit: self._commit_vllm,
        }

    async def run(self) -> None:
        """Serve the session until the client disconnects or its time is over."""
        try:
            async with self._group:
                self._group.create_task(self._end_when_draining())
                self._group.create_task(self._speech.run())
                await self._serve()
        except* Cancelled:
            pass
        except* Draining:
            await self._channel.close(RESTARTS)
        except* SessionOver as over:
            await self._channel.send_error(_first(over))
            await self._channel.close(_NORMAL)
        finally:
            await self._speech.release()

    async def _end_when_draining(self) -> None:
        """Raises Draining when the gateway drains and the current response is done."""
        await self._services.core.draining.wait()
        if self._response is not None:
            await self._response.done()
        raise Draining("this gateway is about to stop")

    async def _serve(self) -> None:
        await self._send_created()
        while True:
            try:
                text = await self._channel.receive(self._time_left_s())
            except TimeoutError:
                self._check_times()
                continue
            except InvalidInput as error:
                await self._channel.send_error(error)
                continue
            self._active_s = monotonic_s()
            await self._handle(text)

    async def _send_created(self) -> None:
        """Send `session.created`, with vLLM's fields where the client may speak its dialect."""
        view = self._config.view(self._id, self._expires_at_s)
        flat: Json = {} if self._config.names_model else {"id": self._id, "created": int(wall_s())}
        await self._channel.send({"type": "session.created", "session": view, **flat})

    def _time_left_s(self) -> float:
        idle_ends_s = self._active_s + self._settings.realtime_idle_timeout_s
        return max(0.0, min(self._ends_s, idle_ends_s) - monotonic_s())

    def _check_times(self) -> None:
        now = monotonic_s()
        if now >= self._ends_s:
            limit_s = self._settings.realtime_session_timeout_s
            raise SessionOver(
                f"the session has reached its limit of {limit_s:g} s "
                "(gateway.realtime_session_timeout_s)"
            )
        if self._response is not None and self._response.is_active:
            self._active_s = now
        if now - self._active_s >= self._settings.realtime_idle_timeout_s:
            limit_s = self._settings.realtime_idle_timeout_s
            raise SessionOver(f"the session was idle for {limit_s:g} s")

    async def _handle(self, text: str) -> None:
        event_id: str | None = None
        try:
            value = await events.decode_event(text, self._settings)
            given_id = value.get("event_id")
            event_id = given_id if isinstance(given_id, str) else None
            event = self._read(value)
            async with self._lock:
                await self._handlers[type(event)](event)
        except (Cancelled, SessionOver):
            raise
        except TokenMeshError as error:
            if error.status >= 500:
                logger.warning("%s: %s", error.code, error.message)
            await self._channel.send_error(error, event_id)

    def _read(self, value: Json) -> events.ClientEvent:
        """The event in the dialect that the first one was in. Raises InvalidInput."""
        if not self._has_events and begins_dialect(value):
            self._channel.translated = VllmEvents().translated
        self._has_events = True
        if self._channel.translated is not None:
            return read_vllm_event(value)
        return events.read_event(value)

    async def _choose_model(self, event: VllmUpdate) -> None:
        card = await self._services.core.mesh.catalog.find_soon(event.model)
        self._config = transcribing(self._config, event.model or card.name)
        await self._speech.configure(self._config)

    async def _append(self, event: events.AudioAppend) -> None:
        self._check_model()
        await self._speech.append(event.audio)

    async def _commit_vllm(self, event: VllmCommit) -> None:
        """Only the end counts: what is appended is transcribed without a beginning."""
        self._check_model()
        if event.final:
            await self._speech.finish()

    def _check_model(self) -> None:
        if self._channel.translated is not None and not self._config.is_vllm:
            raise InvalidInput("send a session.update with a model that is served", param="model")

    async def _update(self, event: events.SessionUpdate) -> None:
        config = self._config.updated(event.session)
        await self._services.core.mesh.catalog.find_soon(config.model)
        self._config = config
        await self._speech.configure(config)
        view = config.view(self._id, self._expires_at_s)
        await self._channel.send({"type": "session.updated", "session": view})

    def _interrupt(self) -> None:
        """Speech has begun: the answer to what was said before is no longer wanted."""
        if self._response is not None and self._response.is_active:
            self._response.cancel()

    async def _answer(self, event: events.ResponseCreate) -> None:
        try:
            if self._response is not None and self._response.is_cancelled:
                await self._response.done()
            async with self._lock:
                await self._create_response(event)
        except (Cancelled, SessionOver):
            raise
        except TokenMeshError as error:
            await self._channel.send_error(error, event.event_id)

    async def _create_item(self, event: events.ItemCreate) -> None:
        item = read_item(event.item, "item")
        previous_id = self._conversation.add(item, event.previous_item_id)
        for kind in ("added", "done"):
            await self._channel.send(
                {
                    "type": f"conversation.item.{kind}",
                    "previous_item_id": previous_id,
                    "item": item.view,
                }
            )

    async def _retrieve_item(self, event: events.ItemRetrieve) -> None:
        item = self._conversation.get(event.item_id)
        await self._channel.send({"type": "conversation.item.retrieved", "item": item.view})

    async def _delete_item(self, event: events.ItemDelete) -> None:
        self._conversation.remove(event.item_id)
        await self._channel.send({"type": "conversation.item.deleted", "item_id": event.item_id})

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        self._conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
        await self._channel.send(
            {
                "type": "conversation.item.truncated",
                "item_id": event.item_id,
                "content_index": event.content_index,
                "audio_end_ms": event.audio_end_ms,
            }
        )

    async def _respond(self, event: events.ResponseCreate) -> None:
        if not self._speech.holds(event):
            await self._create_response(event)

    async def _create_response(self, event: events.ResponseCreate) -> None:
        if self._services.core.draining.is_set():
            raise Draining("this gateway is about to stop: open a new session")
        if self._config.is_transcription:
            raise InvalidInput("a transcription session has no responses", param="type")
        if self._response is not None and self._response.is_active:
            raise ResponseActive(
                f"response {self._response.id} is still active: wait for response.done or "
                "send response.cancel"
            )
        fields = event.response or events.ResponseFields()
        config = self._config.for_response(fields)
        is_apart = fields.conversation == "none"
        if fields.conversation not in (None, "auto", "none", self._conversation_id):
            raise NotFound("response.conversation is unknown", param="response.conversation")
        if not is_apart:
            self._conversation.check_room()
        context = RequestContext(
            RequestId(new_request_id("resp")), True, monotonic_s(), self._access
        )
        context.lease = await self._services.core.tenancy.admission.admit(context)
        try:
            self._response = await self._make_response(config, fields, context, is_apart=is_apart)
            await self._response.start(self._group)
        except BaseException:
            context.release()
            raise

    async def _make_response(
        self,
        config: SessionConfig,
        fields: events.ResponseFields,
        context: RequestContext,
        *,
        is_apart: bool,
    ) -> RealtimeResponse:
        translation = translate(config, self._input(fields))
        with translation.client_paths():
            generation = await build_chat(self._services.builder, translation.chat, context)
        return RealtimeResponse(
            generation,
            self._services,
            self._channel,
            ResponseOutput(context.request_id, None if is_apart else self._conversation),
            translation.fields,
            {
                "conversation_id": None if is_apart else self._conversation_id,
                "max_output_tokens": config.max_output_tokens,
                "metadata": fields.metadata,
            },
            context,
        )

    def _input(self, fields: events.ResponseFields) -> list[Item]:
        """Items that a response answers."""
        if fields.input is None:
            return list(self._conversation)
        items = []
        for index, value in enumerate(fields.input):
            path = f"response.input[{index}]"
            item_id = reference_id(value, path)
            if item_id is None:
                items.append(read_item(value, path))
            else:
                items.append(self._conversation.get(item_id, f"{path}.id", NotFound))
        return items

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        response = self._response
        if response is None or not response.is_active:
            raise NoActiveResponse("there is no active response to cancel")
        if event.response_id not in (None, response.id):
            raise NoActiveResponse(
                f"response_id does not match the active response {response.id}", param="response_id"
            )
        response.cancel()


def _first(group: BaseExceptionGroup[SessionOver]) -> SessionOver:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
