"""GET and POST /ping, POST /invocations: the interface of SageMaker containers."""

from collections.abc import Mapping
from typing import Final

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.http.body import any_body_schema, read_bytes, without_ids
from tokenmesh.services.gateway.http.middleware import Endpoint
from tokenmesh.services.gateway.openai.request import ChatRequest, CompletionRequest
from tokenmesh.services.gateway.routes.health import readiness
from tokenmesh.services.gateway.routes.openai import CHAT, COMPLETIONS
from tokenmesh.shared.errors import InvalidInput

_BODIES: Final[tuple[type[BaseModel], ...]] = (ChatRequest, CompletionRequest)


class _Keys(msgspec.Struct):
    """The fields that select the task; their values are not read here."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_embeds: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def sagemaker_router(gateway: Gateway, endpoints: Mapping[str, Endpoint]) -> APIRouter:
    """`endpoints`: the functions of the tasks by path."""
    router = APIRouter(tags=["generate"])
    limits = gateway.settings

    @router.get("/ping", tags=["operation"])
    async def ping() -> Response:
        """200 while requests can be served; the same as /health."""
        return readiness(gateway)

    @router.post("/ping", tags=["operation"])
    async def post_ping() -> Response:
        """200 while requests can be served; the same as /health."""
        return readiness(gateway)

    @router.post("/invocations", response_model=None, openapi_extra=any_body_schema(_BODIES))
    async def invoke(request: Request) -> Response:
        """Answer `messages` as a chat, `prompt` or `prompt_embeds` as a completion."""
        parts = [await read_bytes(request, limits.max_body_bytes, limits.body_timeout_s)]
        endpoint = endpoints[_path_of(await without_ids(parts[0], limits))]
        # Only this list references the body: it is freed as soon as the endpoint is done with it.
        return await endpoint(Request(request.scope, _replayed(parts, request.receive)))

    return router


def _path_of(data: bytes) -> str:
    """The path of the task. Raises InvalidInput."""
    try:
        keys = msgspec.json.decode(data, type=_Keys)
    except (msgspec.DecodeError, RecursionError):
        # The chat endpoint reports the error.
        return CHAT
    if keys.messages is not msgspec.UNSET:
        return CHAT
    if keys.prompt is not msgspec.UNSET or keys.prompt_embeds is not msgspec.UNSET:
        return COMPLETIONS
    raise InvalidInput(
        "Cannot find suitable handler for request: the body has neither messages nor prompt"
    )


def _replayed(parts: list[bytes], receive: Receive) -> Receive:
    """A `receive` that returns a body that was read before."""

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replay
