"""Kept responses: GET, DELETE, /cancel and /input_items of /v1/responses/{id}."""

from collections.abc import Callable
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tokenmesh.services.gateway.context import context_of
from tokenmesh.services.gateway.errors import JSON, json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.responses.answers import FramesAnswer
from tokenmesh.services.gateway.responses.input_items import page
from tokenmesh.services.gateway.responses.reader import ResponseReader
from tokenmesh.services.gateway.responses.request import Include
from tokenmesh.shared.errors import InvalidInput, NotFound

_PATH: Final = "/v1/responses/{response_id}"
_MAX_NUMBER: Final = 2**53

Includes = Annotated[list[Include] | None, Query()]
Number = Annotated[int | None, Query(ge=0, le=_MAX_NUMBER)]


def stored_responses_router(gateway: Gateway) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["responses"])

    def reader(response_id: str) -> ResponseReader:
        if gateway.responses.reader is None:
            raise NotFound(f"Response with id {response_id[:80]!r} not found.", param="response_id")
        return gateway.responses.reader

    @router.get(_PATH)
    async def get_response(
        request: Request,
        response_id: str,
        include: Includes = None,
        stream: bool = False,
        starting_after: Number = None,
        include_obfuscation: bool = False,
    ) -> Response:
        """A response as it is now, or its events from one on: the rest as they come."""
        access = context_of(request.scope).access
        if not stream:
            return _json(await reader(response_id).get(response_id, access))
        if include_obfuscation:
            raise InvalidInput("include_obfuscation is not supported", param="include_obfuscation")
        first = 0 if starting_after is None else starting_after + 1
        frames = await reader(response_id).events(response_id, access, first)
        return FramesAnswer(frames, gateway.settings)

    @router.delete(_PATH)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response; one that is still made is ended."""
        await reader(response_id).delete(response_id, context_of(request.scope).access)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{_PATH}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End a background response."""
        return _json(
            await reader(response_id).cancel(response_id, context_of(request.scope).access)
        )

    _add_input_items(router, gateway, reader)
    return router


def _add_input_items(
    router: APIRouter, gateway: Gateway, reader: Callable[[str], ResponseReader]
) -> None:
    most = gateway.responses.settings.max_input_items

    @router.get(f"{_PATH}/input_items")
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: int = Query(20, ge=1, le=most),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        before: str | None = None,
        include: Includes = None,
    ) -> Response:
        """What a response was asked, in pages."""
        items = await reader(response_id).input_items(response_id, context_of(request.scope).access)
        return json_response(page(items, limit=limit, order=order, after=after, before=before))


def _json(body: bytes | dict[str, object]) -> Response:
    return Response(body, media_type=JSON) if isinstance(body, bytes) else json_response(body)
