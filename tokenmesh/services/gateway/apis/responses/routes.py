"""Routes of the Responses API, and of OpenAI's Conversations API."""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.tokens import count_prompt_tokens
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.apis.responses.conversations import Conversations, item_of
from tokenmesh.services.gateway.apis.responses.events import ResponseWriter
from tokenmesh.services.gateway.apis.responses.feed import FramesResponse
from tokenmesh.services.gateway.apis.responses.items import page
from tokenmesh.services.gateway.apis.responses.request import Include, ResponsesRequest
from tokenmesh.services.gateway.apis.responses.response_logs import not_found
from tokenmesh.services.gateway.apis.responses.response_plan import prepare
from tokenmesh.services.gateway.apis.responses.service import ResponseReader, Responses
from tokenmesh.services.gateway.apis.responses.shapes import InputTokens
from tokenmesh.services.gateway.apis.responses.translation import is_long, translate
from tokenmesh.services.gateway.core.context import access_of, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.http.fields import Bounded, Metadata
from tokenmesh.services.gateway.core.http.sse import JSON, json_response
from tokenmesh.shared.ids import RequestId, new_response_id
from tokenmesh.shared.telemetry import span

_MAX_INPUT_ITEMS: Final = 100
"""The largest `limit` of a page of input items."""

PATH: Final = "/v1/responses"
_STORED: Final = f"{PATH}/{{response_id}}"
_MAX_NUMBER: Final = 2**53

Includes = Annotated[list[Include] | None, Query()]
Number = Annotated[int | None, Query(ge=0, le=_MAX_NUMBER)]


def response_endpoint(core: Core, responses: Responses) -> Endpoint:
    """The function of POST /v1/responses."""
    maker, builder = responses.maker, RequestBuilder(core)

    async def create_response(request: Request) -> Response:
        """Answer a conversation as items, whole or as a stream of events."""
        context = context_of(request.scope)
        with span("validate"):
            body = await read_json(request, ResponsesRequest, core.settings)
            may_skip = body.store is None
            body = maker.resolve(body)
            response_id = new_response_id()
            if not context.is_own_id:
                # So that the trace is found by the response's id.
                context.request_id = RequestId(response_id)
            if maker.needs_run(body):
                return await maker.make(body, response_id, context, may_skip_storing=may_skip)
            prepared = await prepare(builder, body, context, response_id)
        names = prepared.translation.fields
        writer = ResponseWriter(prepared.events, names)
        context.rename_error = names.rename
        return core.generation.respond(prepared.generation, writer)

    return create_response


def input_tokens_router(core: Core, responses: Responses) -> APIRouter:
    router, builder = APIRouter(tags=["responses"]), RequestBuilder(core)

    @router.post(f"{PATH}/input_tokens", openapi_extra=body_schema(ResponsesRequest))
    async def count_input_tokens(request: Request) -> Response:
        """Return how many tokens a response's prompt would have, those of earlier responses
        included.
        """
        context = context_of(request.scope)
        body = await read_json(request, ResponsesRequest, core.settings)
        body, previous = await responses.maker.load_history(body, context.access)
        is_large = is_long(body, previous) or context.has_large_body
        translation = await off_loop(is_large, translate, body, previous)
        context.warnings.extend(translation.warnings)
        with translation.client_paths():
            count = await count_prompt_tokens(core, builder, translation.chat, context)
        return json_response(InputTokens(input_tokens=count))

    return router


def stored_responses_router(core: Core, responses: Responses) -> APIRouter:
    router = APIRouter(tags=["responses"])

    def reader(response_id: str) -> ResponseReader:
        if responses.reader is None:
            raise not_found(response_id)
        return responses.reader

    @router.get(_STORED)
    async def get_response(
        request: Request,
        response_id: str,
        include: Includes = None,
        stream: bool = False,
        starting_after: Number = None,
        include_obfuscation: bool = False,
    ) -> Response:
        """A response in its current state, or its events after a number, as they are generated."""
        access = access_of(request)
        if not stream:
            return _json(await reader(response_id).get(response_id, access))
        if include_obfuscation:
            raise invalid("include_obfuscation", "is not supported")
        first = 0 if starting_after is None else starting_after + 1
        frames = await reader(response_id).events(response_id, access, first)
        return FramesResponse(frames, core.settings)

    @router.delete(_STORED)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a response, and stop generating it."""
        await reader(response_id).delete(response_id, access_of(request))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{_STORED}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a background response."""
        access = access_of(request)
        return _json(await reader(response_id).cancel(response_id, access))

    _add_input_items(router, responses, reader)
    return router


def _add_input_items(
    router: APIRouter, responses: Responses, reader: Callable[[str], ResponseReader]
) -> None:
    max_items = _MAX_INPUT_ITEMS

    @router.get(f"{_STORED}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: int = Query(20, ge=1, le=max_items),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        before: str | None = None,
        include: Includes = None,
    ) -> Response:
        """The input items of a response, in pages."""
        access = access_of(request)
        items = await reader(response_id).input_items(response_id, access)
        return json_response(page(items, limit=limit, order=order, after=after, before=before))


def _json(body: bytes | Json) -> Response:
    return Response(body, media_type=JSON) if isinstance(body, bytes) else json_response(body)


_MAX_ITEMS: Final = 20
"""It bounds the items of one request, as OpenAI has it."""


class ConversationRequest(Bounded, extra="allow", strict=True):
    items: list[dict[str, Any]] | None = Field(
        default=None, max_length=_MAX_ITEMS, description="The first items."
    )
    metadata: Metadata | None = Field(default=None, description="Kept with the conversation.")


class ConversationUpdate(Bounded, extra="allow", strict=True):
    metadata: Metadata | None = Field(description="Replaces what was there.")


class ConversationItems(Bounded, extra="allow", strict=True):
    items: list[dict[str, Any]] = Field(
        min_length=1, max_length=_MAX_ITEMS, description="Appended in their order."
    )


CONVERSATION_BODIES: Final = (ConversationRequest, ConversationUpdate, ConversationItems)


def conversations_router(core: Core, responses: Responses) -> APIRouter:
    """The routes of conversations."""
    router = APIRouter(tags=["conversations"])

    def store() -> Conversations:
        found = responses.conversations
        if found is None:
            raise NotSupported("conversations are not supported: this server stores no responses")
        return found

    @router.post("/v1/conversations", openapi_extra=body_schema(ConversationRequest))
    async def create_conversation(request: Request) -> Response:
        """A new conversation, for the field `conversation` of responses."""
        body = await read_json(request, ConversationRequest, core.settings)
        made = await store().create(access_of(request), body.items or [], body.metadata or {})
        return json_response(made.view())

    @router.get("/v1/conversations/{conversation_id}")
    async def get_conversation(request: Request, conversation_id: str) -> Response:
        """A conversation without its items."""
        return json_response((await store().get(conversation_id, access_of(request))).view())

    @router.post(
        "/v1/conversations/{conversation_id}", openapi_extra=body_schema(ConversationUpdate)
    )
    async def update_conversation(request: Request, conversation_id: str) -> Response:
        """Replace the metadata of a conversation."""
        body = await read_json(request, ConversationUpdate, core.settings)
        metadata = body.metadata or {}
        found = await store().update(conversation_id, access_of(request), metadata)
        return json_response(found.view())

    @router.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(request: Request, conversation_id: str) -> Response:
        """Delete a conversation and its items."""
        await store().delete(conversation_id, access_of(request))
        deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return json_response(deleted)

    _add_items(router, core, responses, store)
    return router


def _add_items(router: APIRouter, core: Core, responses: Responses, store: Any) -> None:
    max_items = _MAX_INPUT_ITEMS

    @router.get("/v1/conversations/{conversation_id}/items")
    async def list_items(
        request: Request,
        conversation_id: str,
        limit: int = Query(20, ge=1, le=max_items),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        include: Includes = None,
    ) -> Response:
        """The items of a conversation, in pages."""
        found = await store().get(conversation_id, access_of(request))
        return json_response(page(found.items, limit=limit, order=order, after=after, before=None))

    @router.post(
        "/v1/conversations/{conversation_id}/items", openapi_extra=body_schema(ConversationItems)
    )
    async def create_items(
        request: Request, conversation_id: str, include: Includes = None
    ) -> Response:
        """Append items to a conversation."""
        body = await read_json(request, ConversationItems, core.settings)
        items = await store().add(conversation_id, access_of(request), body.items)
        return json_response(page(items, limit=len(items), order="asc", after=None, before=None))

    @router.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def get_item(
        request: Request, conversation_id: str, item_id: str, include: Includes = None
    ) -> Response:
        """One item of a conversation."""
        found = await store().get(conversation_id, access_of(request))
        return json_response(item_of(found, item_id))

    @router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
        """Delete one item of a conversation; what is left is the answer."""
        found = await store().remove(conversation_id, access_of(request), item_id)
        return json_response(found.view())
