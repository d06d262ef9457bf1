"""A small API of no one: chats whose answers are in capitals; see docs/guides/add-an-api.md."""

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.chat_builder import build_chat
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.translation import FieldNames, validate_chat
from tokenmesh.services.gateway.core.api import (
    CHAT_OPERATION,
    AnswerKind,
    AnswerShape,
    Api,
    Routes,
)
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.generation.chunk import OutputChunk
from tokenmesh.services.gateway.core.generation.delivery import Delivery
from tokenmesh.services.gateway.core.http.body import read_json
from tokenmesh.services.gateway.core.http.endpoint import Endpoint, Post
from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.services.gateway.core.http.sse import encode_json, json_response
from tokenmesh.shared.errors import TokenMeshError

PATH = "/shout/v1/say"
WORDS = "/shout/v1/words"
_NAMES = FieldNames({"max_completion_tokens": "words", "messages": "say"}, {})


class SayRequest(Bounded):
    say: str = Field(min_length=1, description="What to answer.")
    words: int = Field(default=64, description="At most so many tokens.")
    stream: bool = Field(default=False, description="Whether to answer in lines.")


class Said(msgspec.Struct):
    id: str
    shout: str


class ShoutError(msgspec.Struct):
    problem: str
    field: str | None
    request: str


class ShoutWriter:
    keep_alive = b""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id

    def begin(self, delivery: Delivery) -> bytes:
        return b""

    def write(self, delivery: Delivery, chunks: list[OutputChunk]) -> bytes:
        return "".join(chunk.text for chunk in chunks).upper().encode()

    def end(self, delivery: Delivery) -> bytes:
        return b"!\n"

    def fail(self, error: TokenMeshError) -> bytes:
        return encode_json({"problem": error.message})

    def whole(self, delivery: Delivery, chunks: list[OutputChunk]) -> Said:
        return Said(self._id, "".join(chunk.text for chunk in chunks).upper() + "!")


def write_error(error: TokenMeshError, context: RequestContext) -> tuple[ShoutError, int]:
    return ShoutError(error.message, error.param, context.request_id), error.status


def say_endpoint(core: Core) -> Endpoint:
    builder = RequestBuilder(core)

    async def say(request: Request) -> Response:
        """Answer in capitals."""
        context = context_of(request.scope)
        context.rename_error = _NAMES.rename
        body = await read_json(request, SayRequest, core.settings)
        fields = {
            "messages": [{"role": "user", "content": body.say}],
            "max_completion_tokens": body.words,
            "stream": body.stream,
        }
        chat = validate_chat(fields, _NAMES)
        generation = await build_chat(builder, chat, context)
        return core.generation.respond(generation, ShoutWriter(context.answer_id))

    return say


def words_router() -> APIRouter:
    router = APIRouter(tags=["shout"])

    @router.get(WORDS)
    async def words() -> Response:
        """Words that can be said."""
        return json_response({"words": ["hello"]})

    return router


def build(core: Core) -> Routes:
    return Routes(posts={PATH: Post(say_endpoint(core), SayRequest)}, routers=[words_router()])


SHOUT = Api(
    name="shout",
    build=build,
    prefixes=("/shout/",),
    write_error=write_error,
    error_body=ShoutError,
    answer_kinds={PATH: AnswerKind("shout", CHAT_OPERATION)},
    exempt={"GET": (WORDS,)},
    answers={("post", PATH): AnswerShape([Said], streams=True)},
)
