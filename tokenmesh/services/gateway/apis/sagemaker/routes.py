"""GET and POST /ping, POST /invocations: the interface of SageMaker containers."""

from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from tokenmesh.services.gateway.apis.openai.routes import CHAT, COMPLETIONS
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import any_body_schema, read_bytes, without_ids
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.services.gateway.core.readiness import readiness
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.pooling import PoolTask

_PATHS: Final = (
    *(CHAT, COMPLETIONS, "/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
    *("/v1/moderations", "/score", "/rerank"),
)
"""Routes whose bodies are described."""
_BY_TASK: Final[dict[PoolTask, str]] = {"embed": "/v1/embeddings", "classify": "/classify"}
_POOLING: Final = "/pooling"
"""For models with neither task."""
_BY_FIELD: Final = {
    "query": "/rerank",
    "text_1": "/score",
    "data_1": "/score",
    "queries": "/score",
    "texts": "/v2/embed",
    "inputs": "/v2/embed",
}


class _Keys(msgspec.Struct):
    """The fields that select the task; of their values only the model's name is read."""

    model: str | msgspec.UnsetType | None = msgspec.UNSET

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_embeds: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_1: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    queries: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def sagemaker_router(core: Core) -> APIRouter:
    router = APIRouter(tags=["generate"])
    limits, bodies = core.settings, [core.posts[path].body for path in _PATHS]

    @router.get("/ping", tags=["operation"])
    async def ping() -> Response:
        """200 while requests can be served; the same as /health."""
        return readiness(core)

    @router.post("/ping", tags=["operation"])
    async def post_ping() -> Response:
        """200 while requests can be served; the same as /health."""
        return readiness(core)

    @router.post("/invocations", response_model=None, openapi_extra=any_body_schema(bodies))
    async def invoke(request: Request) -> Response:
        """Answer a body as the route of its fields does.

        `messages` as a chat, `prompt` or `prompt_embeds` as a completion, `input` by the tasks of
        the model, `texts` or `inputs` as Cohere's embeddings, `query` as reranking, `text_1`,
        `data_1` or `queries` as scores. Models that do not generate have `messages` as `input`.
        """
        parts = [await read_bytes(request, limits.max_body_bytes, limits.body_timeout_s)]
        path = await _path_of(await without_ids(parts[0], limits), core.mesh.catalog)
        endpoint = core.posts[path].endpoint
        # Only this list references the body: it is freed as soon as the endpoint is done with it.
        return await endpoint(Request(request.scope, _replayed(parts, request.receive)))

    return router


async def _path_of(data: bytes, catalog: Catalog) -> str:
    """The path of the task. Raises InvalidInput, and what looking for the model raises."""
    try:
        keys = msgspec.json.decode(data, type=_Keys)
    except (msgspec.DecodeError, RecursionError):
        # The chat endpoint reports the error.
        return CHAT
    if keys.input is not msgspec.UNSET or keys.messages is not msgspec.UNSET:
        card = await catalog.find_soon(keys.model or None)
        if card.generates and keys.messages is not msgspec.UNSET:
            return CHAT
        return next((_BY_TASK[task] for task in card.tasks if task in _BY_TASK), _POOLING)
    for name, path in _BY_FIELD.items():
        if getattr(keys, name) is not msgspec.UNSET:
            return path
    if keys.prompt is not msgspec.UNSET or keys.prompt_embeds is not msgspec.UNSET:
        return COMPLETIONS
    raise InvalidInput(
        "Cannot find suitable handler for request: the body has none of messages, prompt, input, "
        "texts, query, text_1"
    )


def _replayed(parts: list[bytes], receive: Receive) -> Receive:
    """A `receive` that returns a body that was read before."""

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replay
