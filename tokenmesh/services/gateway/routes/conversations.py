"""OpenAI's Conversations API: conversations and their items."""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import body_schema, read_json
from tokenmesh.services.gateway.http.errors import NotSupported
from tokenmesh.services.gateway.http.fields import Bounded, Metadata
from tokenmesh.services.gateway.http.sse import json_response
from tokenmesh.services.gateway.responses.conversations import Conversations, item_of
from tokenmesh.services.gateway.responses.items import page
from tokenmesh.services.gateway.responses.request import Include
from tokenmesh.services.gateway.tenancy.tenant import Access

_MAX_ITEMS: Final = 20
"""Of one request, as OpenAI has it."""

Includes = Annotated[list[Include] | None, Query()]


class ConversationRequest(Bounded):
    model_config = ConfigDict(extra="allow", strict=True)

    items: list[dict[str, Any]] | None = Field(
        default=None, max_length=_MAX_ITEMS, description="The first items."
    )
    metadata: Metadata | None = Field(default=None, description="Kept with the conversation.")


class ConversationUpdate(Bounded):
    model_config = ConfigDict(extra="allow", strict=True)

    metadata: Metadata | None = Field(description="Replaces what was there.")


class ConversationItems(Bounded):
    model_config = ConfigDict(extra="allow", strict=True)

    items: list[dict[str, Any]] = Field(
        min_length=1, max_length=_MAX_ITEMS, description="Appended in their order."
    )


BODIES: Final = (ConversationRequest, ConversationUpdate, ConversationItems)


def conversations_router(gateway: Gateway) -> APIRouter:
    """The routes of conversations."""
    router = APIRouter(tags=["conversations"])

    def store() -> Conversations:
        found = gateway.responses.conversations
        if found is None:
            raise NotSupported("conversations are not supported: this server stores no responses")
        return found

    @router.post("/v1/conversations", openapi_extra=body_schema(ConversationRequest))
    async def create_conversation(request: Request) -> Response:
        """A new conversation, for the field `conversation` of responses."""
        body = await read_json(request, ConversationRequest, gateway.settings)
        made = await store().create(_access(request), body.items or [], body.metadata or {})
        return json_response(made.view())

    @router.get("/v1/conversations/{conversation_id}")
    async def get_conversation(request: Request, conversation_id: str) -> Response:
        """A conversation without its items."""
        return json_response((await store().get(conversation_id, _access(request))).view())

    @router.post(
        "/v1/conversations/{conversation_id}", openapi_extra=body_schema(ConversationUpdate)
    )
    async def update_conversation(request: Request, conversation_id: str) -> Response:
        """Replace the metadata of a conversation."""
        body = await read_json(request, ConversationUpdate, gateway.settings)
        metadata = body.metadata or {}
        found = await store().update(conversation_id, _access(request), metadata)
        return json_response(found.view())

    @router.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(request: Request, conversation_id: str) -> Response:
        """Delete a conversation and its items."""
        await store().delete(conversation_id, _access(request))
        deleted = {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        return json_response(deleted)

    _add_items(router, gateway, store)
    return router


def _add_items(router: APIRouter, gateway: Gateway, store: Any) -> None:
    max_items = gateway.responses.settings.max_input_items

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
        found = await store().get(conversation_id, _access(request))
        return json_response(page(found.items, limit=limit, order=order, after=after, before=None))

    @router.post(
        "/v1/conversations/{conversation_id}/items", openapi_extra=body_schema(ConversationItems)
    )
    async def create_items(
        request: Request, conversation_id: str, include: Includes = None
    ) -> Response:
        """Append items to a conversation."""
        body = await read_json(request, ConversationItems, gateway.settings)
        items = await store().add(conversation_id, _access(request), body.items)
        return json_response(page(items, limit=len(items), order="asc", after=None, before=None))

    @router.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def get_item(
        request: Request, conversation_id: str, item_id: str, include: Includes = None
    ) -> Response:
        """One item of a conversation."""
        found = await store().get(conversation_id, _access(request))
        return json_response(item_of(found, item_id))

    @router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
        """Delete one item of a conversation; what is left is the answer."""
        found = await store().remove(conversation_id, _access(request), item_id)
        return json_response(found.view())


def _access(request: Request) -> Access:
    return context_of(request.scope).access
